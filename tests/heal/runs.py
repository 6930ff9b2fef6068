"""One run in a process of its own, as a script for ``python`` and ``accelerate launch``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run(recipe: Path, folder: Path, processes: int = 1) -> str:
    """``indexcache train run`` to the end; returns what it printed."""
    command = [sys.executable, "-m"]
    if processes > 1:
        command += ["accelerate.commands.launch", "--cpu", "--num_processes", str(processes)]
        command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        command += ["--main_process_port", "0", "-m"]
    command += ["sglang_indexcache.cli", "train", "run", str(recipe), "-o", str(folder)]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_until_killed(recipe: Path, folder: Path, step: int) -> None:
    """The same, but the process gets SIGKILL once its log has reached ``total_step``."""
    command = [sys.executable, "-m", "sglang_indexcache.cli", "train", "run"]
    process = subprocess.Popen(
        [*command, str(recipe), "-o", str(folder)],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    log = folder / "metrics.jsonl"
    try:
        while not (log.exists() and f'"total_step": {step},' in log.read_text()):
            assert process.poll() is None, "the run ended before it could be killed"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
