"""The record of every finished evaluation, on disk before it counts.

The first line of the journal says what was measured (checkpoint, data, evaluator); each other line
is one finished evaluation. Nothing about the algorithm is in it: an algorithm is deterministic, so
running it again over a journal gives the answer that an uninterrupted run would have given, and
every method can use every other method's evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_indexcache.errors import SearchError
from sglang_indexcache.study import journal


@dataclass(frozen=True)
class Record:
    """One finished evaluation.

    Attributes:
        pattern: the F/S string.
        batches: calibration batch numbers.
        losses: nats per token of each of them; JSON keeps every bit of a float64.
        layer_tokens: what it cost, tokens times layers.
        seconds: how long it took, for the estimate of what is left.
    """

    pattern: str
    batches: tuple[int, ...]
    losses: tuple[float, ...]
    layer_tokens: int
    seconds: float


class Journal(journal.Journal):
    """A search's journal, locked while it is open.

    Raises:
        SearchError: the file is another search's (checkpoint, data or evaluator differ), damaged
            before its last line, or in use by another process.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        super().__init__(path, identity, "search", SearchError)
        try:
            self.records: list[Record] = list(self.parsed(_record))
        except BaseException:
            self.close()
            raise

    def append(self, record: Record) -> None:
        """Write one finished evaluation; on disk when this returns."""
        self.write(asdict(record) | {"seconds": round(record.seconds, 3)})


def _record(entry: Mapping[str, Any]) -> Record:
    return Record(
        entry["pattern"],
        tuple(entry["batches"]),
        tuple(entry["losses"]),
        entry["layer_tokens"],
        entry["seconds"],
    )
