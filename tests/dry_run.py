"""The device check as a machine without a GPU can run it: the command, in a bare environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "device_check.sh"
SECONDS = 3000


def dry_run(folder: Path, *options: str) -> tuple[Path, str]:
    """Run it with ``--dry``; returns the JSON that it wrote and what it printed."""
    out = folder / "report.json"
    done = subprocess.run(
        ["bash", str(SCRIPT), *options, "--dry", "--out", str(out), "--seconds", str(SECONDS)],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout
