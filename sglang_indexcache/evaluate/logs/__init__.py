"""Per-sample logs of other harnesses: one file a format, and its row in `FORMATS`.

A harness judges and prompts as it likes; its scores are taken as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.logs import inspect, lm_eval, plain
from sglang_indexcache.evaluate.logs.sample import Row, Sample, first_row
from sglang_indexcache.stats.pairs import Cell


def _nothing(*_: object) -> Mapping[Cell, float]:
    return {}


@dataclass(frozen=True)
class Format:
    """A kind of log.

    Attributes:
        files: what its files are called within a run's folder.
        head: the row by which it is recognised.
        fits: whether that row is of this kind.
        read: a file's samples, given the metric that the user chose.
        reported: what the harness itself printed of a metric, by task and length, where it tells.
    """

    files: tuple[str, ...]
    head: Callable[[Path], Row]
    fits: Callable[[Row], bool]
    read: Callable[[Path, str | None], Iterator[Sample]]
    reported: Callable[[Path, str], Mapping[Cell, float]] = _nothing


FORMATS = {
    "lm-eval": Format(lm_eval.FILES, first_row, lm_eval.fits, lm_eval.read, lm_eval.reported),
    "inspect": Format(inspect.FILES, inspect.header, inspect.fits, inspect.read, inspect.reported),
    "plain": Format(plain.FILES, first_row, plain.fits, plain.read),
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
        place: the path.
        metric: which score to compare; may be left out if there is only one.

    Raises:
        QualityError: nothing there that is a log, or more than one choice; each with the mend.
    """
    path = Path(place)
    if not path.exists():
        raise QualityError(f"there is no log at {place}. Give a run's folder or file.")
    kind, files = _recognise(path)
    _once(kind, files)
    samples = tuple(sample for file in files for sample in FORMATS[kind].read(file, metric))
    if not samples:
        raise QualityError(f"{place} has no sample")
    reported = {
        cell: value
        for file in files
        for cell, value in FORMATS[kind].reported(file, samples[0].metric).items()
    }
    return Log(name, kind, samples, reported)


def _recognise(path: Path) -> tuple[str, list[Path]]:
    for kind, shape in FORMATS.items():
        for pattern in shape.files:
            files = [path] if path.is_file() else sorted(path.glob(pattern))
            files = files or sorted(path.rglob(pattern))
            found = [file for file in files if _is(shape, file)]
            if found:
                return kind, found
    known = "; ".join(f"{kind}: {', '.join(shape.files)}" for kind, shape in FORMATS.items())
    raise QualityError(
        f"{path} holds no per-sample log that is known ({known}). Let the harness write its "
        "samples (lm-eval: --log_samples), or write .jsonl with an object of id and score a line, "
        "and give the file or its folder"
    )


def _is(shape: Format, file: Path) -> bool:
    try:
        return shape.fits(shape.head(file))
    except (QualityError, UnicodeDecodeError):
        return False


def _once(kind: str, files: list[Path]) -> None:
    """One run only: a folder often holds several, and their samples must not be mixed."""
    if kind == "lm-eval":
        tasks = [lm_eval.task_of(file) for file in files]
        several = len(set(tasks)) < len(tasks)
    else:
        several = len(files) > 1
    if several:
        raise QualityError(
            f"{files[0].parent} holds several runs ({files[0].name}, {files[-1].name}, ...): give "
            "the file or the folder of one"
        )
