"""Expected gain of sharing, by model, card and context, and how far it can be trusted.

Composes whole forwards from NVIDIA's measured layers at the contexts of the paper's Table 1, and
the table that ``indexcache bench plan`` reads. Predicts every row from its neighbours, holds the
sums against NVIDIA's own estimator and what an indexer costs against the paper, and writes it all,
with a figure. Only what was composed is written, no row of the wheel.

python -m benchmarks.expect
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.forwards import MOST_OFF, Deployment, Forwards
from benchmarks.nvidia_rows import (
    CARDS,
    WHEEL,
    Chunks,
    Kind,
    LatencyEstimate,
    Layers,
    share_of,
)
from benchmarks.records import markdown, read_arguments
from sglang_indexcache.errors import BenchError
from sglang_indexcache.kernels.contract import INDEX_KEY_BYTES
from sglang_indexcache.lab.latency.forecast import MODELS, TABLE, Phase, choose_patterns
from sglang_indexcache.lab.latency.tables import NAMES
from sglang_indexcache.lab.runs.plots import make_figure, save_figure
from sglang_indexcache.lab.runs.provenance import machine
from sglang_indexcache.library.lengths import format_length
from sglang_indexcache.library.resolve import Library
from sglang_indexcache.library.sizes import checkpoint_of, find_gpu, has_room
from sglang_indexcache.library.writing import write_json, write_whole
from sglang_indexcache.pattern import Pattern

CONTEXTS = (10_000, 60_000, 120_000, 200_000)
"""Those of the paper's Table 1."""
RATIOS = ("1/2", "1/4")
DEPLOYMENTS = (
    Deployment("GLM-5-FP8", "h200"),
    Deployment("GLM-5-FP8", "b200"),
    Deployment("GLM-5-FP8", "h200", dp=8),
    Deployment("GLM-5-FP8", "b200", dp=8),
    Deployment("DeepSeek-V3.2", "h200"),
    Deployment("DeepSeek-V3.2", "b200"),
    Deployment("GLM-5-FP8", "h100"),
    Deployment("GLM-5-FP8", "h100", dp=8),
    Deployment("DeepSeek-V3.2", "h100"),
)
WAYS = ("row split", "prefill CP")
KV_BYTES = {"fp8": 656, "bfloat16": 1152}
"""Bytes of a token's latent row (FlashMLA's FP8 format; 576 bfloat16)."""
DEALT = [d for d in DEPLOYMENTS if d.dp == 1 and d.model == "GLM-5-FP8" and d.gpu != "h100"]
"""Deployments whose rows know how all heads on one rank take a prefill, as CP has them."""
PLANNED = tuple(sorted({*range(8192, 200_000, 8192), *CONTEXTS}))
"""Contexts of the table of ``bench plan``, which is a straight line between them; the paper's are
among them, so that both tables say the same."""
FEWEST = 8
"""A pattern with one F layer in so many is composed as well; in between, time is linear."""
SHORTEST = 1024
"""Tokens of the shortest chunk whose rows are checked: no server makes shorter ones by default."""
SHOWN: tuple[Phase, ...] = ("prefill", "decode")
PAPER = "the paper: 30B, 8 x H100, dp 8"
COLORS = {
    ("GLM-5-FP8", "h200"): "#1f5fa8",
    ("GLM-5-FP8", "b200"): "#c0392b",
    ("DeepSeek-V3.2", "h200"): "#2e8b57",
    ("DeepSeek-V3.2", "b200"): "#d98c21",
}
"""By model and card; a deployment with data-parallel attention has the same, dashed."""
PAPERS = {
    "prefill": {"full": (0.57, 3.38, 8.57, 19.5), "1/4": (0.45, 2.59, 5.66, 10.7)},
    "decode": {"full": (73.5, 67.0, 63.0, 58.0), "1/4": (91.0, 89.5, 88.0, 86.0)},
}
"""Table 1: seconds of prefill, and tokens a second of one request, at :data:`CONTEXTS`."""
PAPERS_SKIPPED = 47 - 12
"""Layers of the paper's 30B model that skip their indexer at 1/4."""


def gains(deployment: Deployment) -> dict[str, Any]:
    """Compose the gains of one deployment, and say what they rest on."""
    source = Forwards(deployment)
    patterns, sources = choose_patterns(RATIOS, deployment.measured.shape)
    by_metric: dict[str, Any] = {}
    for metric in SHOWN:
        by_metric[metric] = {}
        for name, pattern in patterns:
            cells = {n: source.gain(metric, pattern, n) for n in CONTEXTS}
            by_metric[metric][name] = {
                str(n): None
                if cell is None
                else {
                    "every_indexer_ms": round(cell.milliseconds, 3),
                    "gain": round(cell.gain, 4),
                    "off": round(cell.off, 4),
                }
                for n, cell in cells.items()
            }
    return {
        "deployment": str(deployment),
        "model": deployment.model,
        "gpu": deployment.gpu,
        "dp": deployment.dp,
        "weights_fit": has_room(deployment.weight_bytes, find_gpu(deployment.gpu).memory),
        "full_layers": {name: len(pattern.full_layers) for name, pattern in patterns},
        "sources": [*source.sources, *sources],
        "gains": by_metric,
    }


class ContextParallelLayers:
    """Layers of which each rank attends with a share of the rows, by all heads, in prefill.

    Latents and index keys are gathered. Of decode, where no heads are split, nothing is said.
    """

    def __init__(self, forwards: Forwards) -> None:
        deployment, names = forwards.deployment, forwards.deployment.measured
        heads = deployment.shape.num_attention_heads
        self._layers = forwards.wheel.layers(
            names.full, names.shared, heads, names.weights, deployment.cache
        )
        self._ranks, self._gather = deployment.ranks, forwards.gather
        self._key_bytes = KV_BYTES[deployment.cache]

    def chunk(self, kind: Kind, tokens: int, prefix: int) -> LatencyEstimate | None:
        """Return milliseconds of one layer."""
        part = self._layers.chunk(kind, *share_of(tokens, prefix, self._ranks))
        gathered_bytes = self._key_bytes + (INDEX_KEY_BYTES if kind == "F" else 0)
        gathered = self._gather.at(tokens * gathered_bytes)
        return None if part is None or gathered is None else part + gathered


def dealt_out(deployment: Deployment) -> dict[str, Any]:
    """Compose what sharing the rows of a prefill gains, with every indexer and at 1/4."""
    source = Forwards(deployment)
    shared: tuple[Chunks, ...] = (source.row_split, ContextParallelLayers(source))
    [(_, quarter)], _ = choose_patterns(["1/4"], deployment.measured.shape)
    patterns = {"every indexer": Pattern.full(len(quarter)), "1/4": quarter}
    ways: dict[str, Any] = {}
    for way, layers in zip(WAYS, shared, strict=True):
        ways[way] = {}
        for name, pattern in patterns.items():
            cells = {n: source.gain("prefill", pattern, n, layers) for n in CONTEXTS}
            ways[way][name] = {str(n): cell and round(cell.gain, 4) for n, cell in cells.items()}
    return {"deployment": str(deployment), "dp": 1, "ways": ways, "sources": source.sources} | {
        name: getattr(deployment, name) for name in ("model", "gpu")
    }


def planned(deployment: Deployment) -> dict[str, Any]:
    """Compose a deployment's row of the table of ``bench plan``."""
    forwards, layers = Forwards(deployment), deployment.shape.num_hidden_layers
    few = layers // FEWEST

    def cost(kind: str, context: int) -> tuple[float, float, float] | None:
        """Return milliseconds with every indexer, of one layer's indexer, and how far off."""
        if kind == "decode":
            every, least = (forwards.decode(count, context) for count in (layers, few))
        else:
            over = forwards.row_split if kind == "row split" else None
            every, least = (forwards.prefill(count, context, over) for count in (layers, few))
        if every is None or least is None or (off := max(every.off, least.off)) > MOST_OFF:
            return None
        indexer = (every.value - least.value) / (layers - few)
        return round(every.value, 4), round(indexer, 6), round(off, 4)

    return {
        "model": deployment.model,
        "gpu": deployment.gpu,
        "dp": deployment.dp,
        "layers": layers,
        "title": str(deployment),
        "costs": {kind: [cost(kind, n) for n in PLANNED] for kind in (*SHOWN, WAYS[0])},
        "sources": forwards.sources,
    }


def write_table() -> None:
    """Write the table of ``bench plan``: every deployment on eight GPUs that fits and has rows."""
    rows = []
    for model, gpu, dp in product(MODELS, CARDS, (1, 2, 4, 8)):
        deployment = Deployment(model, gpu, dp=dp)
        try:
            deployment.check_fits()
            rows.append(planned(deployment))
        except BenchError:  # it does not fit, or nobody measured its layers
            continue
    lines = ",\n".join(json.dumps(row) for row in rows)
    head = json.dumps({"made_by": f"{WHEEL} {version(WHEEL)}", "contexts": PLANNED})[:-1]
    write_whole(TABLE, f'{head}, "deployments": [\n{lines}\n]}}\n')


def held_out(card: str) -> Iterator[dict[str, Any]]:
    """Yield how far each row of a card was from what its neighbours say, by phase and kind."""
    on_card = [Forwards(deployment) for deployment in DEPLOYMENTS if deployment.gpu == card]
    for phase in SHOWN:
        for kind in ("F", "S"):
            errors = [
                abs(error)
                for forwards in on_card
                for (k, size), estimate in getattr(forwards.layers, phase).items()
                if k == kind and (phase == "decode" or size >= SHORTEST)
                for x, error in estimate.errors()
                if x >= forwards.deployment.shape.index_topk
            ]
            yield {
                "card": card,
                "phase": phase,
                "kind": kind,
                "rows": len(errors),
                "median": round(median(errors), 4),
                "worst": round(max(errors), 4),
                "over_a_tenth": sum(error > 0.1 for error in errors),
            }


def table_1() -> list[dict[str, Any]]:
    """Compare what a skipped indexer saves by the paper's Table 1 and by the same indexer's rows.

    GLM-5's indexer has the heads and the width of the paper's 30B model's. With dp_attention each
    H100 has prompts of its own, cut in eighths of the engine's chunk, unless it is raised: the
    paper does not say, so both are compared.
    """
    layers = Forwards(Deployment("GLM-5-FP8", "h100", dp=8)).layers
    rows = []
    for place, context in enumerate(CONTEXTS):
        seconds, rates = (
            [PAPERS[metric][name][place] for name in ("full", "1/4")] for metric in SHOWN
        )
        prefill, decode = seconds[0] - seconds[1], 1 / rates[0] - 1 / rates[1]
        for phase, skipped, row in (
            ("prefill, chunks of 1,024", prefill, saved_by_chunks(layers, 1024, context)),
            ("prefill, chunks of 8,192", prefill, saved_by_chunks(layers, 8192, context)),
            ("decode", decode, apart(layers.step("F", 1, context), layers.step("S", 1, context))),
        ):
            paper = 1e3 * skipped / PAPERS_SKIPPED
            rows.append(
                {
                    "phase": phase,
                    "context": context,
                    "paper_ms": round(paper, 4),
                    "rows_ms": round(row, 4),
                    "difference": round(row / paper - 1, 3),
                }
            )
    return rows


def apart(full: LatencyEstimate | None, shared: LatencyEstimate | None) -> float:
    """Return the milliseconds between a layer with its indexer and one without."""
    if full is None or shared is None:
        raise BenchError("the rows end before the paper's contexts")
    return full.value - shared.value


def saved_by_chunks(layers: Layers, chunk: int, context: int) -> float:
    """Return the milliseconds that one layer's indexer takes for a prompt."""
    cut = [(min(chunk, context - prefix), prefix) for prefix in range(0, context, chunk)]
    return sum(apart(layers.chunk("F", *piece), layers.chunk("S", *piece)) for piece in cut)


def nvidias_estimate(deployment: Deployment) -> list[dict[str, Any]]:
    """Compare our sums with every indexer with those of the wheel's own estimator."""
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    from aiconfigurator_core.sdk import common, models, perf_database
    from aiconfigurator_core.sdk.backends.factory import get_backend
    from aiconfigurator_core.sdk.config import ModelConfig, RuntimeConfig

    forwards, names = Forwards(deployment), deployment.measured
    data = perf_database.get_database(f"{deployment.gpu}_sxm", "sglang", "0.5.14")
    backend = get_backend("sglang")
    config = ModelConfig(
        tp_size=8, moe_tp_size=8, moe_ep_size=1,
        kvcache_quant_mode=common.KVCacheQuantMode[deployment.cache],
    )  # fmt: skip
    model = models.get_model(names.full, config, "sglang")

    def theirs(phase: str, **about: int) -> float:
        return float(
            backend.run_static_latency_only(
                model, data, RuntimeConfig(batch_size=1, **about), phase
            )
        )

    rows = []
    for context in CONTEXTS:
        chunks = [
            (prefix, min(deployment.chunk, context - prefix))
            for prefix in range(0, context, deployment.chunk)
        ]
        total = sum(theirs("static_ctx", isl=p + n, osl=1, prefix=p) for p, n in chunks)
        step = theirs("static_gen", isl=context, osl=2)
        full = deployment.shape.num_hidden_layers
        for phase, their, our in (
            ("prefill", total, forwards.prefill(full, context)),
            ("decode", step, forwards.decode(full, context)),
        ):
            if our is not None:
                rows.append(
                    {
                        "deployment": str(deployment),
                        "phase": phase,
                        "context": context,
                        "difference": round(our.value / their - 1, 4),
                    }
                )
    return rows


def measure() -> dict[str, Any]:
    """Compose and compare everything that the record holds."""
    return {
        "environment": machine(),
        "wheel": f"{WHEEL} {version(WHEEL)}",
        "engine": "SGLang 0.5.14",
        "contexts": CONTEXTS,
        "deployments": [gains(deployment) for deployment in DEPLOYMENTS],
        "dealt": [dealt_out(deployment) for deployment in DEALT],
        "held_out": [row for card in CARDS for row in held_out(card)],
        "table_1": table_1(),
        "nvidias_estimate": [
            row
            for deployment in DEPLOYMENTS
            if deployment.dp == 1
            for row in nvidias_estimate(deployment)
        ],
    }


def papers_gain(metric: str, ratio: str, context: int) -> float:
    """Return the paper's own gain, of its 30B model on eight H100 with dp_attention."""
    name = {"prefill": "prefill time", "decode": "decode, one request"}
    entry = Library.default().resolve(ratio, checkpoint_of("30b")).entry
    assert entry is not None
    [row] = (
        row
        for row in entry.latency
        if row.metric.startswith(name[metric]) and row.context == format_length(context)
    )
    assert row.all_full is not None
    return row.all_full / row.value if metric == "prefill" else row.value / row.all_full


def label(deployment: dict[str, Any]) -> str:
    """Name a deployment in few words."""
    ranks = f"dp {deployment['dp']}" if deployment["dp"] > 1 else "tp 8"
    card = find_gpu(deployment["gpu"]).name.removesuffix(" SXM")
    return f"{deployment['model']}, 8 x {card}, {ranks}"


def table(record: dict[str, Any]) -> str:
    """Write what to expect at 1/4 by context, in Markdown: a row a deployment, the paper's last."""
    contexts = record["contexts"]
    rows = []
    for deployment in record["deployments"]:
        if deployment["weights_fit"]:
            gains = [deployment["gains"][metric]["1/4"] for metric in SHOWN]
            rows.append((label(deployment), *(_cell([g[str(n)] for g in gains]) for n in contexts)))
    paper = [
        " / ".join(f"{papers_gain(metric, '1/4', n):.2f}x" for metric in SHOWN) for n in contexts
    ]
    rows.append((f"{PAPER}, measured", *paper))
    return markdown(("", *map(format_length, contexts)), rows)


def baselines(record: dict[str, Any]) -> str:
    """Write what 1/4 gains in prefill beside engines that share rows, in Markdown."""
    contexts, rows = [str(n) for n in record["contexts"]], []
    plain = {label(each): each["gains"]["prefill"]["1/4"] for each in record["deployments"]}
    for each in record["dealt"][:1]:  # the plan prints the others
        name = label(each)
        rows.append((f"{name}: 1/4", *(f"{plain[name][n]['gain']:.2f}x" for n in contexts)))
        for way, gains in each["ways"].items():
            every, quarter = gains["every indexer"], gains["1/4"]
            rows.append((f"{way}, every indexer", *(f"{every[n]:.2f}x" for n in contexts)))
            cells = (f"{quarter[n]:.2f}x ({quarter[n] / every[n]:.2f}x)" for n in contexts)
            rows.append((f"{way}, 1/4 (what 1/4 adds)", *cells))
    return markdown(("", *map(format_length, record["contexts"])), rows)


def first_screen(record: dict[str, Any]) -> str:
    """Write the prefill gains of the first deployment, in Markdown, with both baselines.

    The last row is beside an engine that shares a prefill's rows among its ranks already.
    """
    first, dealt = record["deployments"][0], record["dealt"][0]["ways"]
    contexts = [str(n) for n in record["contexts"] if n >= 60_000]
    plain, split, parallel = first["gains"]["prefill"]["1/4"], *(dealt[way] for way in WAYS)
    rows = [
        ("pattern `1/4`", *(plain[n]["gain"] for n in contexts)),
        ("row split, every bit the same", *(split["every indexer"][n] for n in contexts)),
        ("both", *(split["1/4"][n] for n in contexts)),
        (
            "`1/4`, over prefill context parallelism with every indexer",
            *(parallel["1/4"][n] / parallel["every indexer"][n] for n in contexts),
        ),
    ]
    header = (
        f"{label(first)}: prefill, over every indexer on every rank",
        *(format_length(int(n)) for n in contexts),
    )
    return markdown(header, [(name, *(f"{g:.2f}x" for g in gains)) for name, *gains in rows])


def _cell(cells: list[dict[str, Any] | None]) -> str:
    rates = [cell for cell in cells if cell is not None]
    return " / ".join(f"{rate['gain']:.2f}x" for rate in rates) if len(rates) == 2 else "no rate"


def checks(record: dict[str, Any]) -> str:
    """Write how far held-out rows, NVIDIA's estimator and the paper are from ours, in Markdown."""
    first = markdown(
        ("", "rows", "median error", "worst", "over 10 %"),
        [
            (
                f"{find_gpu(row['card']).name}, {row['phase']}, {row['kind']} layers",
                *(row["rows"], f"{row['median']:.1%}", f"{row['worst']:.0%}", row["over_a_tenth"]),
            )
            for row in record["held_out"]
        ],
        "each row predicted from its neighbours, from top-k on",
    )
    lines: dict[str, list[str]] = {}
    for row in record["table_1"]:
        difference = f"{row['paper_ms']:.3g} and {row['rows_ms']:.3g} ({row['difference']:+.0%})"
        lines.setdefault(row["phase"], []).append(difference)
    second = markdown(
        ("", *map(format_length, record["contexts"])),
        [(phase, *cells) for phase, cells in lines.items()],
        "what a skipped indexer saves at 1/4, ms a layer: by the paper's Table 1, and by the rows "
        "of an indexer of the same size",
    )
    away = [abs(row["difference"]) for row in record["nvidias_estimate"]]
    sentence = (
        f"With every indexer our sums are {median(away):.1%} (at worst {max(away):.0%}) from those "
        f"of NVIDIA's own estimator in the same wheel, over {len(away)} sums."
    )
    return f"{first}\n{second}\n{sentence}\n"


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw gains at 1/4 against the context, prefill and decode, the paper's as diamonds."""
    figure, axes = make_figure(11.5, 3.8, columns=2, sharey=True)
    contexts = [n / 1e3 for n in record["contexts"]]
    for axis, metric in zip(axes, SHOWN, strict=True):
        for deployment in record["deployments"]:
            if not deployment["weights_fit"]:
                continue
            cells = deployment["gains"][metric]["1/4"]
            points = {int(n): cell["gain"] for n, cell in cells.items() if cell}
            axis.plot(
                [n / 1e3 for n in points], list(points.values()),
                ls="--" if deployment["dp"] > 1 else "-", marker="o", ms=3.5,
                color=COLORS[deployment["model"], deployment["gpu"]], label=label(deployment),
            )  # fmt: skip
        axis.plot(
            contexts, [papers_gain(metric, "1/4", n) for n in record["contexts"]],
            ls="none", marker="D", ms=5, color="black", label=f"{PAPER} (measured)",
        )  # fmt: skip
        axis.set_title(NAMES[metric], fontsize=10, loc="left")
        axis.set_xlabel("context, thousands of tokens")
        axis.set_xticks(contexts)
        axis.set_ylim(bottom=1.0)
        axis.grid(lw=0.3, alpha=0.5)
    axes[0].set_ylabel("speed-up at 1/4 (every indexer = 1)")
    axes[1].legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.suptitle("Composed from measured layers, not measured as a whole", fontsize=10)
    save_figure(figure, path)


def main() -> None:
    """Compose, check, write and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    arguments = read_arguments(parser, "expect.json")
    output = arguments.output
    write_table()
    write_json(output, {"command": arguments.command, **measure()})
    record = json.loads(output.read_text())
    draw(record, output.with_suffix(".png"))
    print(table(record))
    print(checks(record))


if __name__ == "__main__":
    main()
