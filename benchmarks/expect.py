"""Tables of the gain that sharing should have, composed from NVIDIA's measured layers.

The question is settled: ``expect.json``, and the table of ``indexcache bench plan``, were composed
by commit ea3e8b8d's ``benchmarks.expect`` and are only read here.
"""

from __future__ import annotations

from typing import Any

from benchmarks.records import markdown
from sglang_indexcache.lab.latency.forecast import Phase
from sglang_indexcache.library.lengths import format_length
from sglang_indexcache.library.resolve import Library
from sglang_indexcache.library.sizes import checkpoint_of, find_gpu

WAYS = ("row split", "prefill CP")
SHOWN: tuple[Phase, ...] = ("prefill", "decode")
PAPER = "the paper: 30B, 8 x H100, dp 8"


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
