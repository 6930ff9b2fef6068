"""Per-sample logs of other harnesses: one file a format, and its row in `FORMATS`.

A harness judges and prompts as it likes; its scores are taken as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.logs import inspect, lm_eval
from sglang_indexcache.evaluate.logs.sample import Printed, Sample, is_plain, read_plain
from sglang_indexcache.stats.pairs import Cell


class Format(NamedTuple):
    """A kind of log.

    Attributes:
        files: what its files are called within a run's folder.
        fits: whether a file is of this kind.
        read: a file's samples of the metric that the user chose, and what the harness itself
            printed of it.
    """

    files: tuple[str, ...]
    fits: Callable[[Path], bool]
    read: Callable[[Path, str | None], tuple[list[Sample], Printed]]


FORMATS = {
    "lm-eval": Format(("samples_*.jsonl",), lm_eval.fits, lm_eval.read),
    "inspect": Format(("*.eval", "*.json"), inspect.fits, inspect.read),
    "plain": Format(("*.jsonl",), is_plain, read_plain),
}


@dataclass(frozen=True)
class Log:
    """One run of a harness.

    Attributes:
        name: how the run is called in the report.
        kind: of :data:`FORMATS`.
        samples: in the order of the log.
        reported: what the harness printed, by task and length; empty where it does not tell.
    """

    name: str
    kind: str
    samples: tuple[Sample, ...]
    reported: Mapping[Cell, float] = field(default_factory=dict)


def read_log(name: str, place: str, metric: str | None = None) -> Log:
    """Read a file, or all files of a run's folder.

    Args:
        name: how the run is called in the report.
        metric: which score to compare; may be left out if there is only one.

    Raises:
        QualityError: nothing there that is a log, or more than one choice; each with the mend.
    """
    path = Path(place)
    if not path.exists():
        raise QualityError(f"there is no log at {place}. Give a run's folder or file.")
    kind, files = _recognise(path)
    samples: list[Sample] = []
    reported: dict[Cell, float] = {}
    for file in files:
        found, printed = FORMATS[kind].read(file, metric)
        # A folder often holds several runs, and their samples must not be mixed.
        if {one.task for one in found} & {one.task for one in samples}:
            raise QualityError(
                f"{path} holds several runs ({files[0].name}, {files[-1].name}, ...): give the "
                "file or the folder of one"
            )
        samples += found
        reported |= printed
    if not samples:
        raise QualityError(f"{place} has no sample")
    return Log(name, kind, tuple(samples), reported)


def _recognise(path: Path) -> tuple[str, list[Path]]:
    for kind, shape in FORMATS.items():
        for pattern in shape.files:
            files = [path] if path.is_file() else sorted(path.glob(pattern))
            files = files or sorted(path.rglob(pattern))
            if found := [file for file in files if _is(shape, file)]:
                return kind, found
    known = "; ".join(f"{kind}: {', '.join(shape.files)}" for kind, shape in FORMATS.items())
    raise QualityError(
        f"{path} holds no per-sample log that is known ({known}). Let the harness write its "
        "samples (lm-eval: --log_samples), or write .jsonl with an object of id and score a line, "
        "and give the file or its folder"
    )


def _is(shape: Format, file: Path) -> bool:
    try:
        return shape.fits(file)
    except (QualityError, UnicodeDecodeError):
        return False
