"""A made-up SGLang of one module, as a folder and as a wheel."""

from __future__ import annotations

import zipfile
from pathlib import Path

from sglang_indexcache.serving.engine_version import EngineSource

MODULE = "sglang.srt.thing"


def write(folder: Path, code: str, version: str | None = None) -> Path:
    """``folder`` with ``sglang/`` in it, whose module ``srt/thing.py`` is ``code``."""
    srt = folder / "sglang" / "srt"
    srt.mkdir(parents=True)
    (srt / "server_args.py").touch()
    (srt / "thing.py").write_text(code)
    if version:
        about = folder / f"sglang-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n"
        )
    return folder


def source(folder: Path, code: str, version: str | None = None) -> EngineSource:
    return EngineSource.at(write(folder, code, version))


def wheel(folder: Path, at: Path) -> Path:
    """``folder`` packed into the file ``at``."""
    with zipfile.ZipFile(at, "w") as archive:
        for file in sorted(folder.rglob("*")):
            archive.write(file, file.relative_to(folder))
    return at
