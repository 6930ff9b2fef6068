"""Record the installed SGLang as the tested one: ``python -m tests.record_seams``.

It writes the digest of each seam and of each file that has seams to ``serving/seams.json``.
"""

from __future__ import annotations

import json

from sglang_indexcache.errors import UnsupportedEngineError
from sglang_indexcache.serving import engine_version
from sglang_indexcache.serving.engine_version import EngineSource


def digests_of(source: EngineSource) -> dict[str, str]:
    """Return the digest of each seam, empty if it is gone, and of each file that has seams."""
    modules = {seam.module for seam in engine_version.seams()}
    files = dict(filter(None, map(source.file, modules)))
    return {seam.path: source.digest(seam) or "" for seam in engine_version.seams()} | files


def record(source: EngineSource) -> None:
    """Write down ``source`` as the tested version.

    Raises:
        UnsupportedEngineError: the table names what is not there.
    """
    digests = digests_of(source)
    paths = [seam.path for seam in engine_version.seams()]
    if wrong := "; ".join(f"{path} is gone" for path in paths if not digests[path]):
        raise UnsupportedEngineError(f"{source.name} cannot be recorded: {wrong}")
    record = {source.version or source.name: dict(sorted(digests.items()))}
    engine_version.RECORDS.write_text(f"{json.dumps(record, indent=1)}\n", encoding="utf-8")


if __name__ == "__main__":
    record(EngineSource.installed())
