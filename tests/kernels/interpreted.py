"""Run a file of Triton tests again where Triton interprets its kernels."""

from __future__ import annotations

import os
import subprocess
import sys


def output_of(file: str) -> str:
    """Return what pytest prints of a file's tests in Triton's interpreter, but the one that asks.

    In a process of its own: what Triton runs kernels on is decided at import.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not triton"]
    run = subprocess.run(
        [*command, file],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout
