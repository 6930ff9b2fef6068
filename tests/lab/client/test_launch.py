"""No server outlives whoever started it, however that ends.

A script stands for SGLang's processes. That SGLang's own end with their first one is shown by
``tests/e2e/test_trouble.py``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.signals import group_members, hears_sigint

OWNER = """
import sys, time
from pathlib import Path
from sglang_indexcache.lab.client.launch import Server

server = Server([], Path(sys.argv[1]))
server.command = [sys.executable, "-c", sys.argv[2]]
with server:
    while "READY" not in server.log_tail():
        time.sleep(0.05)
    print(server.pid, flush=True)
    time.sleep(600)
"""
SERVER = """
import subprocess, sys, time
from sglang_indexcache.lab.client.launch import die_with_parent

subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], preexec_fn={last_act})
print("READY", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
@pytest.mark.parametrize(
    ("number", "last_act"),
    [
        (signal.SIGKILL, "die_with_parent"),  # as SGLang's processes do; nobody else can end them
        (signal.SIGINT, None),  # the owner stops the whole group itself
    ],
)
def test_no_process_outlives_its_parent(
    tmp_path: Path, number: signal.Signals, last_act: str | None
) -> None:
    script = SERVER.format(last_act=last_act)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "log"), script],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=hears_sigint,
    )
    assert owner.stdout is not None
    group = int(owner.stdout.readline())
    assert len(group_members(group)) == 2
    os.kill(owner.pid, number)
    owner.wait(30)
    deadline = time.monotonic() + 30
    while (remaining := group_members(group)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not remaining
