"""Inspect: ``.eval`` (a ZIP of samples, compressed by Zstandard) and ``.json`` logs.

Followed: ``EvalRecorder``, ``EvalSample`` and ``value_to_float`` of inspect-ai 0.3.285. Long
prompts are kept apart, by the hash of what they say, so that they compare by it.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile, ZipInfo

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.logs.sample import Row, Sample, as_number, cluster, digest, pick

FILES = ("*.eval", "*.json")
_ZSTANDARD = 93
_LOCAL_HEADER = 30
_WORDS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}


def fits(row: Row) -> bool:
    """Whether a row, here the log's header, is of this format."""
    return "eval" in row and "task" in row["eval"]


def header(path: Path) -> Row:
    """What the log says of the whole run; empty for a file that is none.

    Raises:
        QualityError: a damaged archive.
    """
    if path.suffix == ".json":
        return _json(path)
    try:
        with ZipFile(path) as archive:
            names = set(archive.namelist())
            for name in ("header.json", "_journal/start.json"):
                if name in names:
                    return _object(_member(archive, archive.getinfo(name)))
    except (BadZipFile, ValueError) as error:
        raise QualityError(f"{path} is not a whole Inspect log: {error}") from error
    return {}


def read(path: Path, metric: str | None) -> Iterator[Sample]:
    """The samples of one run; each epoch is one.

    Raises:
        QualityError: the run was cancelled or has failed, or its log is damaged.
    """
    about = header(path)
    if about.get("status") != "success":
        raise QualityError(
            f"the run of {path} did not end well (status {about.get('status', 'unknown')}): what "
            "it lacks may be the hard questions. Let it finish (inspect eval-retry)"
        )
    task = str(about["eval"]["task"])
    try:
        yield from _read(path, task, metric)
    except (KeyError, TypeError, AttributeError, ValueError, EOFError) as error:
        raise QualityError(f"{path} is damaged, or no log of Inspect ({error})") from error


def reported(path: Path, metric: str) -> dict[tuple[str, int], float]:
    """What the harness printed: the mean, or the accuracy, of a score."""
    about = header(path)
    for score in (about.get("results") or {}).get("scores") or ():
        if score.get("name") == metric:
            metrics = score.get("metrics") or {}
            for name in ("accuracy", "mean"):
                if name in metrics:
                    return {(str(about["eval"]["task"]), 0): float(metrics[name]["value"])}
    return {}


def _read(path: Path, task: str, metric: str | None) -> Iterator[Sample]:
    rows = list(_samples(path))
    chosen = pick(sorted({name for row in rows for name in row.get("scores") or {}}), metric, path)
    for row in rows:
        score = (row.get("scores") or {}).get(chosen, {})
        question = str(row["id"])
        yield Sample(
            task,
            question,
            cluster(row.get("metadata"), question),
            digest(_said(row["input"]), row.get("choices"), row["target"]),
            chosen,
            None if row.get("error") else as_number(_number(score.get("value")), path),
        )


def _samples(path: Path) -> Iterator[Row]:
    if path.suffix == ".json":
        yield from _json(path).get("samples") or []
        return
    with ZipFile(path) as archive:
        for info in archive.infolist():
            if info.filename.startswith("samples/") and info.filename.endswith(".json"):
                yield _object(_member(archive, info))


def _said(prompt: Any) -> Any:
    """The prompt without the ids that every run gives its messages anew."""
    if isinstance(prompt, list):
        return [(message.get("role"), message.get("content")) for message in prompt]
    return prompt


def _number(value: Any) -> Any:
    return _WORDS.get(value, value) if isinstance(value, str) else value


def _json(path: Path) -> Row:
    try:
        return _object(path.read_bytes())
    except json.JSONDecodeError:
        return {}


def _object(data: bytes) -> Row:
    found = json.loads(data)
    return found if isinstance(found, dict) else {}


def _member(archive: ZipFile, info: ZipInfo) -> bytes:
    """A member's bytes; Python reads Zstandard in archives from 3.14 on."""
    if info.compress_type != _ZSTANDARD:
        return archive.read(info)
    import zstandard

    assert archive.fp is not None
    archive.fp.seek(info.header_offset)
    name, extra = struct.unpack("<HH", archive.fp.read(_LOCAL_HEADER)[-4:])
    archive.fp.seek(name + extra, io.SEEK_CUR)
    packed = archive.fp.read(info.compress_size)
    try:
        unpacker = zstandard.ZstdDecompressor()
        with unpacker.stream_reader(packed, read_across_frames=True) as stream:
            return stream.read()
    except zstandard.ZstdError as error:
        raise ValueError(f"{info.filename}: {error}") from error
