"""The introduction's figure: which share of the time goes to the indexers, by context.

    python -m benchmarks.paper.shares --quick
    python -m benchmarks.paper.shares --model /models/GLM-5-FP8 --context 10K 60K 200K -- --tp 8

Table 1 with every indexer on and nothing else. Without ``--model``, a small model with random
weights on this machine's CPU. Writes the folder shares.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.paper import table_1
from benchmarks.records import read_arguments
from sglang_indexcache.bench.results import LatencyResult, load
from sglang_indexcache.bench.tables import PANELS, describe
from sglang_indexcache.study.plots import make_figure, save_figure
from sglang_indexcache.support.lengths import format_length


def draw(result: LatencyResult, path: Path) -> None:
    """The baseline's shares by metric, where its server told them."""
    figure, [axis] = make_figure(6.0, 3.6)
    for metric in result.metrics:
        shares = [result.indexer_share(metric, length) for length in result.lengths]
        known = [(n, 100 * share) for n, share in zip(result.lengths, shares, strict=True) if share]
        axis.plot(*zip(*known, strict=True), marker="o", ms=4, label=PANELS[metric])
    axis.set_xscale("log", base=2)
    axis.set_xticks(result.lengths, [format_length(n) for n in result.lengths])
    axis.minorticks_off()
    axis.set_xlabel("context, tokens")
    axis.set_ylabel("indexers' share of the time, %")
    axis.set_ylim(0, 100)
    axis.set_title(describe(result), fontsize=9, loc="left")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, frameon=False)
    save_figure(figure, path)


def main(argv: list[str] | None = None) -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    table_1.options(parser)
    arguments = read_arguments(parser, "shares", argv, table_1.QUICK)
    model = ["--model", str(arguments.model)] if arguments.model else []
    table_1.main(
        [
            *("--pattern", "full", "--output", str(arguments.output), *model),
            *("--rounds", str(arguments.rounds), "--new-tokens", str(arguments.new_tokens)),
            *("--context", *arguments.context, "--", *arguments.server_flags),
        ]
    )
    if (record := arguments.output / "latency.json").exists():
        draw(load(record), arguments.output / "latency-share.png")


if __name__ == "__main__":
    main()
