"""Nothing outlives whoever started it, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.preloaded import ROOT
from tests.signals import hears_sigint

OWNER = """
import sys, time
from importlib import import_module
from pathlib import Path

module, name, model, log = *sys.argv[1:4], Path(sys.argv[4])
Server = getattr(import_module(module), name)
arguments = ["--model-path", model, "--attention-backend", "indexcache",
             "--max-total-tokens", "4096"]
with Server(arguments, log) as server:
    server.wait_until_ready()
    print("READY", server.pid, flush=True)
    time.sleep(600)
"""


def group_members(group: int) -> list[int]:
    """Processes of one process group that are not zombies."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                members.append(int(entry.name))
    return members


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
# A process of Python's ends by SIGTERM as by SIGKILL, without cleaning up: the kernel has to tell
# a server, and SGLang its processes, so these are started as users start them. By SIGINT the owner
# stops the server itself, and a fork stops like any other.
@pytest.mark.parametrize(
    ("number", "server"),
    [
        (signal.SIGKILL, ("sglang_indexcache.lab.client.launch", "Server")),
        (signal.SIGINT, ("tests.preloaded", "PreloadedServer")),
    ],
)
def test_no_process_outlives_its_parent(
    tmp_path: Path, glm: Path, number: signal.Signals, server: tuple[str, str]
) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, *server, str(glm), str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=hears_sigint,
    )
    assert owner.stdout is not None
    words = owner.stdout.readline().split()
    assert words[:1] == ["READY"], (tmp_path / "log").read_text()[-2000:]
    group = int(words[1])
    assert len(group_members(group)) >= 3  # the server, a scheduler, a detokenizer
    os.kill(owner.pid, number)
    owner.wait(30)
    deadline = time.monotonic() + 30
    while (remaining := group_members(group)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not remaining
