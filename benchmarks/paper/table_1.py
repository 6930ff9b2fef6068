r"""Table 1 with the speed-up figure, and the introduction's: which share the indexers take.

    python -m benchmarks.paper.table_1 --quick
    python -m benchmarks.paper.table_1
    python -m benchmarks.paper.table_1 --model /models/GLM-5-FP8 --pattern full 1/2 1/4 \
        --context 10K 60K 120K 200K -- --tp 8 --dp 8 --enable-dp-attention

Prefill and decode at 1/2 and 1/4 against every indexer; the shares need ``--pattern full`` alone.
Without ``--model`` this machine's CPU serves a small model with random weights, and only ratios
mean anything. What follows ``--`` goes to the servers. Writes the folder latency/cpu.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

from benchmarks.paper import indexcache, repeated
from benchmarks.random_model import make_model
from benchmarks.records import RUNS, read_arguments
from sglang_indexcache.lab.latency.measure import write_latency
from sglang_indexcache.lab.latency.results import LatencyResult
from sglang_indexcache.lab.latency.tables import NAMES, describe
from sglang_indexcache.lab.runs.plots import BLUE, GREEN, RED, make_figure, save_figure
from sglang_indexcache.library.lengths import format_length

COLORS = {"prefill": BLUE, "decode": RED, "full": GREEN}
NAME = "latency/cpu"
PATTERNS = ["full", "1/2=uniform:1/2", "1/4=uniform:1/4"]
CONTEXTS = ["1024", "4096", "8192", "16384"]
QUICK = {"context": ["1024", "4096"], "rounds": 1, "new_tokens": 16}
FIELDS = {"num_hidden_layers": 4, "index_n_heads": 6}
ON_A_CPU = ["--max-total-tokens", "33536", "--disable-overlap-schedule"]


def draw_shares(result: LatencyResult, path: Path) -> None:
    """Draw the baseline's shares by metric, where its server told them: medians and all rounds."""
    figure, [axis] = make_figure(6.0, 3.6)
    for metric in result.metrics:
        shares = {n: result.indexer_shares(metric, n) for n in result.lengths}
        percents = {n: [100 * share for share in values] for n, values in shares.items() if values}
        middle = [median(values) for values in percents.values()]
        axis.errorbar(
            list(percents), middle, marker="o", ms=4, capsize=3, color=COLORS[metric],
            yerr=[
                [at - min(values) for at, values in zip(middle, percents.values(), strict=True)],
                [max(values) - at for at, values in zip(middle, percents.values(), strict=True)],
            ],
            label=NAMES[metric],
        )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_xticks(result.lengths, [format_length(n) for n in result.lengths])
    axis.minorticks_off()
    axis.set_ylabel("indexers' share of the time, %")
    axis.set_xlabel(f"context, tokens; bars: lowest and highest of {result.rounds} rounds")
    axis.set_ylim(0, 100)
    axis.set_title(describe(result), fontsize=9, loc="left")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, frameon=False)
    save_figure(figure, path)


def main(argv: list[str] | None = None) -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pattern", nargs="+", default=PATTERNS)
    parser.add_argument("--model", type=Path, help="a checkpoint's folder")
    parser.add_argument("--context", nargs="+", default=CONTEXTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("server_flags", nargs="*", default=[], metavar="-- FLAGS")
    arguments = read_arguments(parser, NAME, argv, QUICK)
    model, flags, note = arguments.model, arguments.server_flags, f"{arguments.command}."
    if model is None:
        model, flags = RUNS / "dsa-4-small", flags or ON_A_CPU
        make_model(model, fields=FIELDS)
        note += f" Checkpoint: benchmarks.random_model with {FIELDS}, random weights."
    indexcache(
        *("bench", "latency", "--model", model, "--output", arguments.output),
        *("--rounds", str(arguments.rounds), "--new-tokens", str(arguments.new_tokens)),
        *repeated("--pattern", arguments.pattern),
        *repeated("--context", arguments.context),
        *("--", *flags),
    )
    if (record := arguments.output / "latency.json").exists():
        result = LatencyResult.model_validate_json(record.read_text())
        noted = result.model_copy(update={"model": result.model.model_copy(update={"note": note})})
        write_latency(noted, arguments.output)
        draw_shares(noted, arguments.output / "latency-share.png")


if __name__ == "__main__":
    main()
