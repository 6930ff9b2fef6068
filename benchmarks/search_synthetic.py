"""Fast greedy against exhaustive greedy on made-up landscapes of 47 layers.

python benchmarks/search_synthetic.py --first-seed 1000 --seeds 12 \
    --output benchmarks/results/search/synthetic-47.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.constraints import Constraints
from sglang_indexcache.search.evaluators.synthetic import SyntheticEvaluator
from sglang_indexcache.search.ledger import Ledger
from sglang_indexcache.search.methods.greedy import greedy
from sglang_indexcache.search.options import Options
from sglang_indexcache.search.run import Search
from sglang_indexcache.search.targets import parse_targets
from sglang_indexcache.support.files import write_json

LAYERS, BATCHES = 47, 32
NOISES = (0.1, 0.2, 0.3, 0.5)


def main() -> None:
    """Search every landscape both ways and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    rows = [compare(seed, noise) for noise in NOISES for seed in seeds]
    summaries = [summarize([row for row in rows if row["noise"] == noise]) for noise in NOISES]
    for summary in summaries:
        print(summary)
    write_json(
        arguments.output,
        {"layers": LAYERS, "batches": BATCHES, "summary": summaries, "searches": rows},
    )


def compare(seed: int, noise: float) -> dict[str, Any]:
    """One landscape: losses over the start at every mark, and what was paid."""
    evaluator = SyntheticEvaluator(LAYERS, BATCHES, seed, noise=noise)
    constraints = Constraints.make(Pattern.full(LAYERS))
    targets = parse_targets(["1/2", "1/4", "1/8"], constraints)
    exhaustive = Ledger(evaluator)
    path = {len(s.pattern.full_layers): s.loss for s in greedy(exhaustive, constraints, targets)}
    search = Search(Ledger(evaluator), constraints, targets, Options())
    for _ in search.run():
        pass
    return {
        "seed": seed,
        "noise": noise,
        "share_of_tokens": search.search_tokens / exhaustive.spent,
        "marks": [
            {
                "retention": found.mark.label,
                "greedy_added": path[count] - search.start_loss,
                "fast_added": found.loss - search.start_loss,
                "uniform_added": found.baselines["uniform"][1] - search.start_loss,
                "difference": found.loss - path[count],
            }
            for count, found in search.found.items()
        ],
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How often fast greedy ended lower, equal or higher."""
    differences = [mark["difference"] for row in rows for mark in row["marks"]]
    shares = [row["share_of_tokens"] for row in rows]
    return {
        "noise": rows[0]["noise"],
        "patterns": len(differences),
        "lower": sum(d < 0 for d in differences),
        "equal": sum(d == 0 for d in differences),
        "higher": sum(d > 0 for d in differences),
        "largest_excess_nats": max(0.0, *differences),
        "largest_share_of_tokens": max(shares),
    }


if __name__ == "__main__":
    main()
