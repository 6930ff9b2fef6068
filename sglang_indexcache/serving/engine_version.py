"""Whether an SGLang is one that we can extend, judged by what we rely on and not by its number.

``seams.json`` holds, for each version that was tested, a digest of every seam. Another version
whose digests agree will do. ``python -m sglang_indexcache.serving.engine_version`` records the
installed version.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from sglang_indexcache.errors import UnsupportedEngineError
from sglang_indexcache.serving.engine_source import EngineSource
from sglang_indexcache.serving.seams import SEAMS, SUPPORTED_VERSION, Seam

logger = logging.getLogger(__name__)

RECORDS = Path(__file__).with_name("seams.json")
"""``{version: {seam: digest}}``."""

_NAMED = 5
"""How many moved seams an error names."""


@dataclass(frozen=True)
class VersionVerdict:
    """How an SGLang compares with a tested one.

    Attributes:
        source: what was judged.
        tested: the tested version that it was held against: its own, else the nearest.
        moved: each seam that is not as it was, and what became of it.
    """

    source: EngineSource
    tested: str
    moved: tuple[tuple[Seam, str], ...]

    def __str__(self) -> str:
        name, count = self.source.name, len(self.moved)
        if self.source.version == self.tested:
            is_it = "is not" if count else "is"
            return f"this {name} {is_it} the one that sglang-indexcache was tested with"
        if count:
            return (
                f"{name} was not tested, and of the {len(SEAMS)} places in it that IndexCache "
                f"relies on {count} differ from {self.tested}"
            )
        return f"{name} was not tested; everything that IndexCache relies on is as in {self.tested}"

    def summary(self) -> str:
        """What moved, in few words."""
        named = [problem for _, problem in self.moved[:_NAMED]]
        more = len(self.moved) - len(named)
        return "; ".join([*named, *([f"and {more} more"] if more else [])])


def recorded() -> dict[str, dict[str, str]]:
    """The digests of every tested version."""
    records: dict[str, dict[str, str]] = json.loads(RECORDS.read_text(encoding="utf-8"))
    return records


def judge(source: EngineSource) -> VersionVerdict:
    """Hold ``source`` against its own version as it was tested, else against the nearest."""
    records = recorded()
    versions = [source.version] if source.version in records else list(records)
    verdicts = [
        VersionVerdict(source, version, tuple(_moved(source, records[version])))
        for version in versions
    ]
    return min(verdicts, key=lambda verdict: len(verdict.moved))


def check(source: EngineSource | None = None) -> None:
    """Say it in the log if the installed SGLang was not tested but will do.

    Raises:
        UnsupportedEngineError: naming what moved, if it will not do.
    """
    verdict = judge(source or EngineSource.installed())
    untested = verdict.source.version != verdict.tested
    if verdict.moved:
        force = "" if untested else "--force-reinstall "
        raise UnsupportedEngineError(
            f"{verdict}: {verdict.summary()}. Install the tested one: pip install "
            f"{force}'sglang=={SUPPORTED_VERSION if untested else verdict.tested}'. All that "
            f"moved: indexcache server doctor --sglang {verdict.source.root}."
        )
    if untested:
        logger.warning("IndexCache: %s", verdict)


def show(place: Path, console: Console) -> bool:
    """Print what moved in a wheel or a folder; whether this SGLang will do."""
    verdict = judge(EngineSource.at(place))
    lines = [f"  {problem} ({seam.why})" for seam, problem in verdict.moved]
    for line in [f"{verdict}{':' if lines else '.'}", *lines]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return not verdict.moved


def record(source: EngineSource) -> None:
    """Write down ``source`` as a tested version.

    Raises:
        UnsupportedEngineError: the table names what is not there.
    """
    digests = {seam.path: source.digest(seam) or "" for seam in SEAMS}
    if wrong := "; ".join(problem for _, problem in _moved(source, digests)):
        raise UnsupportedEngineError(f"{source.name} cannot be recorded: {wrong}")
    records = recorded() | {source.version or source.name: dict(sorted(digests.items()))}
    text = json.dumps(dict(sorted(records.items())), indent=1)
    RECORDS.write_text(f"{text}\n", encoding="utf-8")


def _moved(source: EngineSource, digests: Mapping[str, str]) -> Iterator[tuple[Seam, str]]:
    for seam in SEAMS:
        if problem := _problem(source, seam, digests.get(seam.path)):
            yield seam, problem


def _problem(source: EngineSource, seam: Seam, known: str | None) -> str | None:
    """What is wrong with ``seam``, whose digest was ``known`` when it was tested, or None."""
    digest = source.digest(seam)
    if digest is None:
        gone = seam.path if source.has_module(seam) else f"module {seam.module}"
        return f"{gone} is gone"
    parameters = source.parameters(seam)
    if parameters is not None and (missing := sorted({*seam.parameters} - parameters)):
        return f"{seam.path} no longer takes {', '.join(missing)}"
    if known is None:
        return f"{seam.path} is not recorded (python -m sglang_indexcache.serving.engine_version)"
    return None if digest == known else f"{seam.path} has changed"


if __name__ == "__main__":
    record(EngineSource.installed())
