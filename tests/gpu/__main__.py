"""Run the GPU tests to their end, whatever they do to the process they run in.

    python -m tests.gpu --report FILE [--seconds 570] [arguments of pytest]

A kernel that faults or hangs takes pytest with it. It is begun again for the tests that are left,
as long as time is left; the one that ended it is in the report as failed.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from tests.gpu.report import AGAIN

ROOT = Path(__file__).parents[2]
FOLDER = "tests/gpu"


def is_cut_off(code: int, report: Path) -> bool:
    """Whether a test ended the process, so that others may be left."""
    return code == AGAIN or (report.exists() and "running" in json.loads(report.read_text()))


def main() -> int:
    """0 if nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, required=True, help="JSON to write and to add to")
    parser.add_argument("--seconds", type=float, default=570.0, help="begin no test after so many")
    options, rest = parser.parse_known_args()
    ends = time.monotonic() + options.seconds
    while True:
        seconds = ends - time.monotonic()
        command = [sys.executable, "-m", "pytest", "-p", "tests.gpu.report", "-m", "gpu"]
        command += ["--gpu-report", str(options.report), "--gpu-seconds", f"{seconds:.0f}"]
        code = subprocess.run([*command, *(rest or [FOLDER])], cwd=ROOT, check=False).returncode
        if not is_cut_off(code, options.report) or time.monotonic() > ends:
            return code


if __name__ == "__main__":
    sys.exit(main())
