"""Bad input through the real command line: one clear error before weights load.

Each case runs ``python -m sglang.launch_server`` and asserts on what a person would see.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.preloaded import Template

pytest.importorskip("sglang")

GLM_CASES = [
    # (arguments, what the one error says); others: tests/serving/test_resolve.py, test_refusals.py
    (["--indexcache-pattern", "no-such-name"], "no-such-name"),
    (["--indexcache-pattern", "broken.yaml"], "broken.yaml"),
    (["--indexcache-pattern", "FSSFSS", "--prefill-attention-backend", "triton"], "triton"),
]


Launch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """``launch(model, "--flag", ..., cwd=folder)``, until it ends."""
    log = tmp_path_factory.mktemp("launches") / "log"

    def run(model: Path, *arguments: str, cwd: Path, **environment: str) -> Any:
        arguments_of_server = command(model, *arguments)[2:]
        forked = Template.of(os.environ).fork(arguments_of_server, log, cwd, environment)
        return subprocess.CompletedProcess(
            arguments_of_server, forked.wait(120), log.read_text(), ""
        )

    return run


def launch_alone(
    model: Path, *arguments: str, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Launch in a process of its own, as a user does."""
    return subprocess.run(
        command(model, *arguments),
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def command(model: Path, *arguments: str) -> list[str]:
    """Return the command of a server with IndexCache."""
    start = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    return [*start, "--attention-backend", "indexcache", *arguments]


def assert_one_error(result: subprocess.CompletedProcess[str], reason: str) -> None:
    output = result.stdout + result.stderr
    assert result.returncode > 0, output
    errors = [line for line in output.splitlines() if line.startswith("indexcache: error:")]
    assert len(errors) == 1, output
    assert reason in errors[0], errors[0]
    assert "Traceback" not in output, output
    assert "Load weight" not in output, output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    (folder / "broken.yaml").write_text("name: [unclosed\n")
    return folder


@pytest.fixture(scope="module")
def config_only(glm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint without its weights: an error that needed them would come too late."""
    target = tmp_path_factory.mktemp("config-only")
    for path in glm.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, target)
    return target


@pytest.mark.parametrize(("arguments", "reason"), GLM_CASES, ids=lambda value: str(value)[-40:])
def test_bad_pattern(
    launch: Launch, config_only: Path, folder: Path, arguments: list[str], reason: str
) -> None:
    assert_one_error(launch(config_only, *arguments, cwd=folder), reason)


def test_no_such_model(launch: Launch, folder: Path) -> None:
    assert_one_error(launch(folder / "nowhere", cwd=folder), "there is no model at")


UPGRADED = """
from importlib.metadata import Distribution as D
version = D.version.fget
D.version = property(lambda d: "0.6.0" if d.metadata["Name"] == "sglang" else version(d))
"""
MOVED = """
import hashlib
digest = hashlib.sha256
hashlib.sha256 = lambda data=b"", **options: digest(data + b"moved", **options)
"""


def test_another_version_of_sglang_that_moved_what_we_rely_on(
    config_only: Path, folder: Path, tmp_path: Path
) -> None:
    """An upgrade behind our back is judged before anything else is.

    A whole process says it as the forks above do.
    """
    (tmp_path / "sitecustomize.py").write_text(UPGRADED + MOVED)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    result = launch_alone(config_only, "--indexcache-pattern", "FSSFS", cwd=folder, PYTHONPATH=path)
    assert_one_error(result, "SGLang 0.6.0 was not tested, and of the")
    assert "differ from 0.5.23" in result.stderr
