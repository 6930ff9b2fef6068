"""The Triton twins without a GPU.

Triton decides at its first import whether kernels are compiled or interpreted, and the engine's
kernels in this process must not be: the interpreter gets a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.csrc

HERE = Path(__file__).parent


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="already interpreting")
@pytest.mark.parametrize(
    "selection",
    [
        ["test_grid.py", "-k", "triton"],
        ["test_triton.py", str(HERE / "test_window.py")],
    ],
)
def test_in_a_process_of_its_own(selection: list[str]) -> None:
    file, *options = selection
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / file)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, *options],
        env=environment,
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = int(done.stdout.split(" passed")[0].split()[-1])
    assert passed >= 10, done.stdout
