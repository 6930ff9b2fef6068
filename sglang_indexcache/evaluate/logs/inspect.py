"""Inspect: ``.eval`` (a ZIP of samples, compressed by Zstandard) and ``.json`` logs.

Followed: ``EvalRecorder``, ``EvalSample`` and ``value_to_float`` of inspect-ai 0.3.285. Long
prompts are kept apart, by the hash of what they say, so that they compare by it.
"""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile, ZipInfo

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.logs.sample import (
    Printed,
    Row,
    Sample,
    as_number,
    cluster,
    digest,
    pick,
)

_ZSTANDARD = 93
_LOCAL_HEADER = 30
_WORDS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}


def fits(path: Path) -> bool:
    """Whether a file is of this format.

    Raises:
        QualityError: a damaged archive.
    """
    return "task" in _log(path, samples=False)[0].get("eval", ())


def read(path: Path, metric: str | None) -> tuple[list[Sample], Printed]:
    """The samples of one run, each epoch one; and the mean, or the accuracy, that it printed.

    Raises:
        QualityError: the run was cancelled or has failed, or its log is damaged.
    """
    about, rows = _log(path, samples=True)
    if about.get("status") != "success":
        raise QualityError(
            f"the run of {path} did not end well (status {about.get('status', 'unknown')}): what "
            "it lacks may be the hard questions. Let it finish (inspect eval-retry)"
        )
    try:
        task = str(about["eval"]["task"])
        names = sorted({name for row in rows for name in row.get("scores") or {}})
        chosen = pick(names, metric, path)
        samples = [_sample(row, task, chosen, path) for row in rows]
        for score in (about.get("results") or {}).get("scores") or ():
            for name in ("accuracy", "mean"):
                if score.get("name") == chosen and name in (score.get("metrics") or {}):
                    return samples, {(task, 0): float(score["metrics"][name]["value"])}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise QualityError(f"{path} is damaged, or no log of Inspect ({error})") from error
    return samples, {}


def _sample(row: Row, task: str, metric: str, path: Path) -> Sample:
    score = (row.get("scores") or {}).get(metric, {})
    value = score.get("value")
    question = str(row["id"])
    return Sample(
        task,
        question,
        cluster(row.get("metadata"), question),
        digest(_said(row["input"]), row.get("choices"), row["target"]),
        metric,
        None
        if row.get("error")
        else as_number(_WORDS.get(value, value) if isinstance(value, str) else value, path),
    )


def _log(path: Path, *, samples: bool) -> tuple[Row, list[Row]]:
    """What a log says of the whole run, empty for a file that is none; and its samples, if asked.

    Raises:
        QualityError: a damaged archive.
    """
    try:
        if path.suffix == ".json":
            about = _object(path.read_bytes())
            return about, about.get("samples") or []
        with ZipFile(path) as archive:
            members = {one.filename: one for one in archive.infolist()}
            heads = [name for name in ("header.json", "_journal/start.json") if name in members]
            about = _object(_member(archive, members[heads[0]])) if heads else {}
            rows = [
                _object(_member(archive, one))
                for name, one in members.items()
                if samples and name.startswith("samples/") and name.endswith(".json")
            ]
            return about, rows
    except (BadZipFile, ValueError, EOFError) as error:
        raise QualityError(f"{path} is damaged, or no log of Inspect: {error}") from error


def _said(prompt: Any) -> Any:
    """The prompt without the ids that every run gives its messages anew."""
    if isinstance(prompt, list):
        return [(message.get("role"), message.get("content")) for message in prompt]
    return prompt


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
