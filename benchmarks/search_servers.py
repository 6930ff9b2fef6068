"""How much faster a search gets with more servers: the schedule alone, on a clock of its own.

Every server takes the same time for every batch, and losses are made up. A search's arithmetic,
switches of the pattern and the network take none.

python benchmarks/search_servers.py --output benchmarks/results/search/servers.json
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.constraints import Constraints
from sglang_indexcache.search.evaluators import BatchLosses
from sglang_indexcache.search.evaluators.synthetic import SyntheticEvaluator
from sglang_indexcache.search.ledger import Ledger
from sglang_indexcache.search.options import Options
from sglang_indexcache.search.run import Search
from sglang_indexcache.search.targets import parse_targets
from sglang_indexcache.study.provenance import versions
from sglang_indexcache.support.files import write_json

BATCHES, BATCH_TOKENS, SEED = 32, 8 * 200_000, 2000
QUIET = 0.05
"""Real seconds without a new call after which none is on its way."""
CASES = [
    *(("fast", servers) for servers in (1, 2, 4, 8)),
    ("greedy", 8),
]


class Clock:
    """Time that passes when all servers work, or when no more work arrives."""

    def __init__(self, servers: int) -> None:
        self.now = 0
        self._servers, self._arrivals = servers, 0
        self._ends: list[int] = []
        self._changed = threading.Condition()

    def work(self, duration: int) -> None:
        """Return when ``duration`` has passed."""
        with self._changed:
            end = self.now + duration
            self._ends.append(end)
            self._arrivals += 1
            self._changed.notify_all()
            while self.now < end:
                arrivals = self._arrivals
                all_work = len(self._ends) == self._servers
                is_quiet = not all_work and not self._changed.wait(QUIET)
                if min(self._ends) > self.now and (
                    len(self._ends) == self._servers or (is_quiet and arrivals == self._arrivals)
                ):
                    self.now = min(self._ends)
                    self._changed.notify_all()
                elif all_work:
                    self._changed.wait(QUIET)
            self._ends.remove(end)
            self._changed.notify_all()


class Servers(SyntheticEvaluator):
    """``in_flight`` servers that take one unit of time for a batch."""

    def __init__(self, layers: int, servers: int) -> None:
        super().__init__(layers, BATCHES, SEED, tokens=BATCH_TOKENS)
        self.in_flight, self.clock = servers, Clock(servers)

    def loss(self, pattern: Pattern, batches: Sequence[int]) -> BatchLosses:
        """See :class:`~sglang_indexcache.search.evaluators.Evaluator`."""
        self.clock.work(len(batches))
        return super().loss(pattern, batches)


def main() -> None:
    """Search with every number of servers and write how long it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[47, 78])
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    rows = []
    for layers in arguments.layers:
        for method, servers in CASES:
            rows.append(search(layers, method, servers))
            print(rows[-1], flush=True)
    facts = {"batches": BATCHES, "batch_tokens": BATCH_TOKENS}
    write_json(arguments.output, {**facts, "versions": versions(), "searches": rows})


def search(layers: int, method: str, servers: int) -> dict[str, Any]:
    """One search; its speed-up is over the time that one server would work on it."""
    constraints = Constraints.make(Pattern.full(layers))
    targets = parse_targets(["1/2", "1/4", "1/8"], constraints)
    evaluator = Servers(layers, servers)
    ledger = Ledger(evaluator)
    search = Search(ledger, constraints, targets, Options.parse(method, "screened"))
    for _ in search.run():
        pass
    alone = ledger.spent // BATCH_TOKENS
    return {
        "layers": layers,
        "method": method,
        "servers": servers,
        "speed_up": round(alone / evaluator.clock.now, 2),
        "tokens": ledger.spent,
        # Commits before the look-ahead have none.
        "tokens_ahead_in_vain": getattr(ledger, "ahead_tokens", 0),
        "patterns": [str(found.pattern) for found in search.found.values()],
    }


if __name__ == "__main__":
    main()
