"""Study of searches' patterns on batches never seen, over many kinds of made-up landscape.

python -m benchmarks.search_synthetic --layers 47 --seeds 8
python -m benchmarks.search_synthetic --layers 78 --seeds 3

Each writes one file into the folder ``search``.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.records import read_arguments
from benchmarks.search_landscape import SeenEvaluator
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.evaluators import Floats
from sglang_indexcache.search.ledger import Ledger
from sglang_indexcache.search.methods import METHODS, METHODS_IN_PROCESS, Method
from sglang_indexcache.search.options import Options
from sglang_indexcache.search.rules import Constraints, Targets, baselines, parse_targets
from sglang_indexcache.search.run import Search
from sglang_indexcache.support.files import write_json

QUICK = {"layers": 12, "seeds": 1}
MARKS = ("1/2", "1/4", "1/8")
BATCHES = 32
FRESH, FRESH_SEED = 3000, 10_001
FIRST_SEED = 2000

Spread = Callable[[np.random.Generator, np.random.Generator, tuple[int, int]], Floats]
"""How ``[layers, batches]`` weigh the layers, from the landscape's and the data's numbers."""


def lognormal(noise: float) -> Spread:
    """Return a spread in which each batch weighs each layer by itself."""
    return lambda _layers, data, shape: np.exp(noise * data.standard_normal(shape))


def pareto(
    _layers: np.random.Generator, data: np.random.Generator, shape: tuple[int, int]
) -> Floats:
    """Let a few batches weigh a layer many times as much as most; mean 1, barely a variance."""
    return 1.5 * data.pareto(2.5, shape)


def in_blocks(
    _layers: np.random.Generator, data: np.random.Generator, shape: tuple[int, int]
) -> Floats:
    """Draw weights of which eight neighbouring layers share most."""
    blocks = np.repeat(data.standard_normal((-(-shape[0] // 8), shape[1])), 8, axis=0)
    return np.exp(0.7 * blocks[: shape[0]] + 0.2 * data.standard_normal(shape))


def rare(layers: np.random.Generator, data: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Let a fifth of the layers matter in one batch of sixteen only, and there a lot."""
    is_rare = layers.random(shape[0]) < 0.2
    strikes = 16.0 * (data.random(shape) < 1 / 16)
    usual = np.exp(0.2 * data.standard_normal(shape))
    return np.where(is_rare[:, None], strikes, usual)


@dataclass(frozen=True)
class Kind:
    """A kind of landscape.

    Attributes:
        spread: how batches weigh layers.
        coupling: see :class:`SeenEvaluator`.
        own_noise: nats (standard deviation) that each pattern has for itself on each batch.
    """

    spread: Spread
    coupling: float = 4.0
    own_noise: float = 0.0


KINDS = {
    "base": Kind(lognormal(0.2)),
    "noisy batches": Kind(lognormal(0.8)),
    "heavy-tailed": Kind(pareto),
    "correlated layers": Kind(in_blocks),
    "rare critical layers": Kind(rare),
    "strong coupling": Kind(lognormal(0.2), coupling=20.0),
    "noise per pattern": Kind(lognormal(0.2), own_noise=0.02),
}


@dataclass(frozen=True)
class Trial:
    """One way to search.

    Attributes:
        half: with half of the budget that nobody gave.
        is_blind: see :class:`SeenEvaluator`.
    """

    method: str
    refine: bool = True
    batches: int = BATCHES
    methods: Mapping[str, Method] = field(default_factory=lambda: METHODS)
    half: bool = False
    is_blind: bool = False

    def options(self, targets: Targets) -> Options:
        """Return the options; half of a budget is half of a server's, which has no start."""
        share = None
        if self.half:
            share = Options.parse(self.method).budget(targets, [1000] * self.batches).share / 2
        return Options.parse(self.method, share, refine=self.refine, methods=self.methods)


SEARCHES = {
    "exhaustive": Trial("greedy", refine=False),
    "fast": Trial("fast"),
    "forward": Trial("forward"),
    "fast, 10x batches": Trial("fast", batches=10 * BATCHES),
    "exhaustive, 3 batches": Trial("greedy", refine=False, batches=3),
    "both": Trial("both"),
    "both, half": Trial("both", half=True),
    "both from one pass": Trial("both", methods=METHODS_IN_PROCESS),
    "both from one pass, half": Trial("both", methods=METHODS_IN_PROCESS, half=True),
    "both from a blind pass": Trial("both", methods=METHODS_IN_PROCESS, is_blind=True),
}
"""``fast``, ``forward``, 3 batches and half of ``both`` take a tenth of the first one's tokens."""


class Landscape(SeenEvaluator):
    """A landscape of one kind."""

    def __init__(
        self, kind: Kind, num_layers: int, num_batches: int, seed: int, data_seed: int = 0
    ) -> None:
        self._kind, self._seeds = kind, (seed, data_seed)
        super().__init__(num_layers, num_batches, seed, data_seed, coupling=kind.coupling)

    def _spread(self, data: np.random.Generator) -> Floats:
        layers = np.random.default_rng([self._seeds[0], 3])
        return self._kind.spread(layers, data, (self.num_layers, len(self.batch_tokens)))

    def _damage(self, pattern: Pattern, places: np.ndarray) -> Floats:
        damage = super()._damage(pattern, places)
        if not self._kind.own_noise or not pattern.shared_layers:
            return damage
        digest = hashlib.sha256(str(pattern).encode()).digest()
        draw = np.random.default_rng([*self._seeds, int.from_bytes(digest[:8], "big")])
        noise: Floats = draw.standard_normal(len(self.batch_tokens))[places]
        return damage + self._kind.own_noise * noise


def compare(name: str, layers: int, seed: int) -> dict[str, Any]:
    """Run every search on one landscape: what patterns add on fresh batches, nats per token."""
    rules = Constraints.make(Pattern.full(layers))
    goal = parse_targets(MARKS, rules)
    fresh = Landscape(KINDS[name], layers, FRESH, seed, FRESH_SEED)

    def added(pattern: Pattern) -> float:
        places = range(FRESH)
        differences: Floats = fresh.loss(pattern, places) - fresh.loss(rules.start, places)
        return round(float(differences.mean()), 8)

    rows: dict[str, Any] = {}
    for title, trial in SEARCHES.items():
        landscape = Landscape(KINDS[name], layers, trial.batches, seed)
        landscape.is_blind = trial.is_blind
        search = Search(Ledger(landscape), goal, trial.options(goal))
        for _ in search.run():
            pass
        assert search.search_tokens <= search.budget.total
        rows[title] = {
            "evaluations_of_32_batches": search.search_tokens / (BATCHES * 1000),
            "added": {f.mark.label: added(f.pattern) for f in search.found.values()},
            "told": {
                f.mark.label: round(f.loss - search.start_loss, 8) for f in search.found.values()
            },
        }
    uniform = {m.label: added(baselines(m.full_layers, rules)["uniform"]) for m in goal.marks}
    return {"kind": name, "layers": layers, "seed": seed, "searches": rows, "uniform": uniform}


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum what each search adds over what exhaustive greedy adds, by kind of landscape."""
    return {kind: _summarize([row for row in rows if row["kind"] == kind]) for kind in KINDS}


def _summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def total(title: str, mark: str, field: str = "added") -> float:
        return float(sum(row["searches"][title][field][mark] for row in rows))

    def worst(title: str, mark: str) -> float:
        searches = [row["searches"] for row in rows]
        return max(s[title]["added"][mark] / s["exhaustive"]["added"][mark] for s in searches)

    titles = rows[0]["searches"]
    paid = {title: [row["searches"][title]["evaluations_of_32_batches"] for row in rows]
            for title in titles}  # fmt: skip
    return {
        "exhaustive_added": {m: total("exhaustive", m) / len(rows) for m in MARKS},
        "uniform_added": {m: float(np.mean([row["uniform"][m] for row in rows])) for m in MARKS},
        "searches": {
            title: {
                "over_exhaustive": {m: total(title, m) / total("exhaustive", m) for m in MARKS},
                "worst_landscape": {m: worst(title, m) for m in MARKS},
                "told_over_added": {m: total(title, m, "told") / total(title, m) for m in MARKS},
                "largest_share_of_tokens": max(
                    a / b for a, b in zip(paid[title], paid["exhaustive"], strict=True)
                ),
            }
            for title in titles
        },
    }


def main() -> None:
    """Simulate and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=47)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    arguments = read_arguments(parser, "search", quick=QUICK)
    output = arguments.output
    settings = {"command": arguments.command, "batches": BATCHES}
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    rows = []
    for kind in KINDS:
        rows += [compare(kind, arguments.layers, seed) for seed in seeds]
        for title, values in _summarize(rows[-len(seeds) :])["searches"].items():
            print(kind, title, values, flush=True)
    facts = {**settings, "layers": arguments.layers, "fresh_batches": FRESH}
    path = output / f"synthetic-{arguments.layers}.json"
    write_json(path, {**facts, "seeds": list(seeds), "summary": summarize(rows), "rows": rows})


if __name__ == "__main__":
    main()
