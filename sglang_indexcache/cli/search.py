"""``indexcache search``: find a pattern for a checkpoint, and compare patterns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from sglang_indexcache.cli.common import (
    CONTEXTS,
    AdminApiKeyOption,
    ApiKeyOption,
    ContextOption,
    ModelOption,
    OutputOption,
    SeedOption,
    UrlsOption,
    connect,
    group,
    json_or_text,
    name_and_value,
    out,
)
from sglang_indexcache.errors import SearchError
from sglang_indexcache.support.lengths import parse_length

if TYPE_CHECKING:
    from sglang_indexcache.ask.pool import LoadPolicy
    from sglang_indexcache.ask.score import Engine
    from sglang_indexcache.search.objective import Score
    from sglang_indexcache.search.sources import Data, Source

app = group("Find a pattern for your checkpoint, and compare patterns.")

OptionalModelOption = Annotated[
    Path | None,
    typer.Option("--model", help="The checkpoint's folder. Only --synthetic goes without."),
]
EnginesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        help="Start SGLang in this process, with a keyword of sglang.Engine such as tp_size=8. "
        "Repeat it for more keywords, or give 'default' for none.",
    ),
]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        min=1.0,
        help="Seconds that one call of a server may take before it is tried again. The default is "
        "600, and one more for every 1000 tokens of the call.",
    ),
]
AtOnceOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Calls that each server of --url has at the same time, of one pattern or several. The "
        "default is 1; a server with data-parallel ranks can do with as many.",
    ),
]
LowPriorityOption = Annotated[
    bool,
    typer.Option(
        "--low-priority",
        help="Let other requests of the servers of --url go first. They must go by priorities.",
    ),
]
SyntheticOption = Annotated[
    int, typer.Option(help="Try the command without a model: layers of a made-up landscape.")
]
DataOption = Annotated[
    str,
    typer.Option(
        help="Documents to measure on: a .jsonl, .parquet or text file, a folder of them, or "
        "'machine' for the Python sources of this machine."
    ),
]
SequenceOption = Annotated[
    str | None,
    typer.Option(
        "--context",
        help=f"Most tokens of a document: {CONTEXTS}. It must be longer than what a query "
        "selects; the default is 8 times that (16Ki for released models).",
    ),
]
ScoreOption = Annotated[
    str | None,
    typer.Option(
        "--score",
        help="Which tokens' loss counts: answers, late (the later half of each document) or all. "
        "The default is answers where the data marks them, else late.",
    ),
]
BatchesOption = Annotated[int, typer.Option(help="Number of calibration batches.")]
PerBatchOption = Annotated[int, typer.Option(help="Number of sequences in a batch.")]
HeldOutOption = Annotated[
    int,
    typer.Option(
        help="Number of further batches. Found patterns are measured on them, none is chosen by "
        "them."
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(help="How transformers runs the model: float32 (the default) or bfloat16."),
]
TargetsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        help="Where to leave a pattern: a ratio such as 1/4, a count of F layers, or the largest "
        "loss, such as +0.5%. Repeat it. The default is 1/2, 1/4 and 1/8.",
    ),
]
MethodOption = Annotated[
    str,
    typer.Option(
        help="How to search: fast, oneshot, forward, similarity, greedy, or greedy:4 in 4 pipeline "
        "blocks."
    ),
]
BudgetOption = Annotated[
    float | None,
    typer.Option(
        help="The most that the search may forward, in shares of exhaustive greedy's tokens. The "
        "default is 0.1, and more for few layers."
    ),
]


@app.command("run")
def run_command(
    output: OutputOption,
    model: OptionalModelOption = None,
    url: UrlsOption = None,
    api_key: ApiKeyOption = None,
    admin_api_key: AdminApiKeyOption = None,
    timeout: TimeoutOption = None,
    at_once: AtOnceOption = None,
    low_priority: LowPriorityOption = False,
    engine: EnginesOption = None,
    synthetic: SyntheticOption = 0,
    data: DataOption = "machine",
    context: SequenceOption = None,
    score: ScoreOption = None,
    batches: BatchesOption = 16,
    per_batch: PerBatchOption = 1,
    held_out: HeldOutOption = 8,
    seed: SeedOption = 0,
    dtype: DtypeOption = None,
    target: TargetsOption = None,
    method: MethodOption = "fast",
    refine: Annotated[
        str,
        typer.Option(
            help="How to improve each pattern that was found: none, screened, swap, or beam:4 for "
            "a beam of 4 patterns."
        ),
    ] = "screened",
    budget: BudgetOption = None,
    keep_full: Annotated[str, typer.Option(help="Layers that stay F, such as 3,5,10-12.")] = "",
    force_shared: Annotated[str, typer.Option(help="Layers that become S at once.")] = "",
    stages: Annotated[int, typer.Option(help="Pipeline stages, whose first layer stays F.")] = 1,
    name: Annotated[
        str, typer.Option(help="Prefix of the patterns' names. The default is the model's name.")
    ] = "",
) -> None:
    """Find which layers can lose their indexer. Start it again after any stop: it resumes.

    The servers of --url must be in live mode; several share the work, and one may go and come back.
    Without --url and --engine, transformers runs the model.
    """
    from sglang_indexcache.search.constraints import Constraints, parse_layers, stage_starts
    from sglang_indexcache.search.options import Options
    from sglang_indexcache.search.session import run_search
    from sglang_indexcache.search.sources import Data
    from sglang_indexcache.search.targets import parse_targets

    options = Options.parse(method, refine, budget)
    measured = Data(data, _length(context), batches, per_batch, held_out, seed, score=_score(score))
    servers = connect(url, api_key, admin_api_key)
    load = _load(servers, timeout, at_once, low_priority)
    source = _source(measured, model, servers, engine, synthetic, dtype, load)
    with source.open() as setup:
        own = setup.checkpoint.own
        constraints = Constraints.make(
            own, parse_layers(keep_full), parse_layers(force_shared), stage_starts(len(own), stages)
        )
        targets = parse_targets(target, constraints)
        run_search(setup, constraints, targets, options, output, name, out)


@app.command("compare")
def compare_command(
    patterns: Annotated[
        list[str],
        typer.Argument(help="Two patterns or more, in any form. The first is the reference."),
    ],
    output: OutputOption,
    model: ModelOption,
    url: UrlsOption = None,
    api_key: ApiKeyOption = None,
    admin_api_key: AdminApiKeyOption = None,
    timeout: TimeoutOption = None,
    at_once: AtOnceOption = None,
    low_priority: LowPriorityOption = False,
    engine: EnginesOption = None,
    data: DataOption = "machine",
    context: SequenceOption = None,
    score: ScoreOption = None,
    batches: BatchesOption = 16,
    per_batch: PerBatchOption = 1,
    held_out: HeldOutOption = 8,
    seed: SeedOption = 0,
    dtype: DtypeOption = None,
    buckets: Annotated[int, typer.Option(help="Points of the curve along the context.")] = 8,
) -> None:
    """Compare patterns on the held-out part of the data that a search would leave."""
    from sglang_indexcache.search.compare import compare
    from sglang_indexcache.search.figures import draw_comparison
    from sglang_indexcache.search.sources import Data
    from sglang_indexcache.support.files import write_json

    if len(patterns) < 2:
        raise SearchError("give at least two patterns; the first is the reference")
    if held_out < 2:
        raise SearchError("a comparison needs at least two held-out batches (--held-out)")
    measured = Data(
        *(data, _length(context), batches, per_batch, held_out, seed),
        use_held_out=True,
        score=_score(score),
    )
    servers = connect(url, api_key, admin_api_key)
    load = _load(servers, timeout, at_once, low_priority)
    source = _source(measured, model, servers, engine, dtype=dtype, load=load)
    with source.open() as setup:
        parsed = [setup.resolve(value) for value in patterns]
        for notice in setup.notices:
            out.print(notice, highlight=False)
        with out.status("measuring ..."):
            first, *others = parsed
            found = compare(setup.token_evaluator, first, others, setup.counted, buckets)
    reference, *titles = [_label(value) for value in patterns]
    named = list(zip(titles, found, strict=True))
    for title, comparison in named:
        out.print(f"{title} against {reference}: {comparison.verdict}", highlight=False)
    numbers = [{"name": title, **comparison.numbers()} for title, comparison in named]
    facts = {
        "reference": reference,
        "identity": setup.identity,
        "data": setup.data,
        "documents": setup.reading,
    }
    write_json(output / "compare.json", {**facts, "comparisons": numbers})
    draw_comparison(named, output / "compare.png", setup.objective)
    out.print(f"numbers and figure are in {output}")


@app.command("overlap")
def overlap_command(
    output: OutputOption,
    model: ModelOption,
    pattern: Annotated[
        str, typer.Option(help="A pattern, in any form, whose blocks are drawn on the heatmap.")
    ] = "",
    data: DataOption = "machine",
    context: SequenceOption = None,
    batches: BatchesOption = 4,
    per_batch: PerBatchOption = 1,
    seed: SeedOption = 0,
    dtype: DtypeOption = None,
) -> None:
    """Measure how much of their selection every two layers have in common."""
    from sglang_indexcache.search.figures import draw_overlap
    from sglang_indexcache.search.objective import Score
    from sglang_indexcache.search.overlap import measure, numbers, read
    from sglang_indexcache.search.sources import Data
    from sglang_indexcache.support.files import write_json

    measured = Data(data, _length(context), batches, per_batch, seed=seed, score=Score.ALL)
    with _source(measured, model, dtype=dtype).open() as setup:
        drawn = setup.resolve(pattern) if pattern else None
        places = track(range(batches), "measuring", console=out, transient=True)
        counter = measure(setup.evaluator, setup.checkpoint.own, places)
    out.print(read(counter.matrix()).in_words(), highlight=False)
    facts = {"identity": setup.identity, "data": setup.data}
    write_json(output / "overlap.json", {**facts, **numbers(counter, drawn)})
    draw_overlap(counter.matrix(), output / "overlap.png", drawn)
    out.print(f"numbers and figure are in {output}")


@app.command("stability")
def stability_command(
    output: OutputOption,
    sets: Annotated[int, typer.Option(help="Number of disjoint calibration sets.")] = 3,
    model: OptionalModelOption = None,
    url: UrlsOption = None,
    api_key: ApiKeyOption = None,
    admin_api_key: AdminApiKeyOption = None,
    timeout: TimeoutOption = None,
    engine: EnginesOption = None,
    synthetic: SyntheticOption = 0,
    data: DataOption = "machine",
    context: SequenceOption = None,
    score: ScoreOption = None,
    batches: BatchesOption = 16,
    per_batch: PerBatchOption = 1,
    seed: SeedOption = 0,
    dtype: DtypeOption = None,
    target: TargetsOption = None,
    method: MethodOption = "fast",
    budget: BudgetOption = None,
) -> None:
    """Search on several calibration sets; report how far the answers agree."""
    from sglang_indexcache.search.options import Options
    from sglang_indexcache.search.sources import Data
    from sglang_indexcache.search.stability import search_each

    if sets < 2:
        raise SearchError("stability needs at least two calibration sets (--sets)")
    options = Options.parse(method, share=budget)
    measured = Data(data, _length(context), batches, per_batch, seed=seed, score=_score(score))
    servers = connect(url, api_key, admin_api_key)
    sources = [
        _source(part, model, servers, engine, synthetic, dtype, _load(servers, timeout))
        for part in measured.parts(sets)
    ]
    result = search_each(sources, target, options, output, out)
    out.print(f"order of the flips: Kendall tau {result.kendall_tau:.3f} on average")
    for mark, share in result.common_full_layers.items():
        chance = result.expected_by_chance[mark]
        words = f"{100 * share:.0f} % of the F layers in common (chance: {100 * chance:.0f} %)"
        out.print(f"{mark}: {words}")


@app.command("cost")
def cost_command(
    layers: Annotated[int, typer.Option(help="Number of layers of the model.")],
    sequences: Annotated[int, typer.Option(help="Number of calibration sequences.")] = 768,
    context: ContextOption = "200K",
    target: TargetsOption = None,
    rate: Annotated[
        float,
        typer.Option(
            help="Tokens that one server prefills in a second at this context, all of its ranks "
            "at work; gives hours."
        ),
    ] = 0.0,
    gpus: Annotated[int, typer.Option(help="Number of GPUs of one server.")] = 8,
    servers: Annotated[int, typer.Option(help="Number of servers that share the work.")] = 1,
    per_batch: PerBatchOption = 1,
    ranks: Annotated[
        int,
        typer.Option(
            "--dp", help="Data-parallel ranks of one server; a short batch leaves some idle."
        ),
    ] = 1,
    method: Annotated[
        list[str] | None,
        typer.Option(help="A method as for run. Repeat it. The default is greedy and fast."),
    ] = None,
    budget: BudgetOption = None,
) -> None:
    """Predict what a search costs at most, before it runs."""
    from sglang_indexcache.pattern import Pattern
    from sglang_indexcache.search.constraints import Constraints
    from sglang_indexcache.search.options import Options, busy_share, cost
    from sglang_indexcache.search.targets import parse_targets

    constraints = Constraints.make(Pattern.full(layers))
    targets = parse_targets(target, constraints)
    tokens, busy = parse_length(context), busy_share(per_batch, ranks)
    table = Table("method", "full evaluations", "forward passes", "tokens", "hours", "GPU-hours")
    for name in method or ["greedy", "fast"]:
        options = Options.parse(name, share=budget)
        bill = cost(
            constraints, targets, options, sequences, tokens, rate * busy or None, gpus, servers
        )
        hours = [f"{h:,.1f}" if h else "give --rate" for h in (bill.hours, bill.gpu_hours)]
        counts = (f"{bill.evaluations:,.0f}", f"{bill.sequences:,.0f}", f"{bill.tokens:.3g}")
        table.add_row(name, *counts, *hours)
    out.print(table)
    if rate:
        share = f"{100 * busy:.0f} % of a server's {ranks} data-parallel ranks at work"
        out.print(
            f"assumed, not measured: each server prefills {rate:,.0f} tokens a second (--rate), as "
            f"with every indexer; batches of {per_batch}, so {share}; no server ever waits",
            highlight=False,
        )


def _source(
    data: Data,
    model: Path | None,
    servers: Sequence[Engine] = (),
    keywords: list[str] | None = None,
    synthetic: int = 0,
    dtype: str | None = None,
    load: LoadPolicy | None = None,
) -> Source:
    """The source that the options of a command describe."""
    from sglang_indexcache.ask.pool import ONE_CALL
    from sglang_indexcache.search.sources import InProcess, Local, Served, Synthetic

    if sum(map(bool, (servers, keywords, synthetic))) > 1:
        raise SearchError("give only one of --url, --engine and --synthetic")
    if dtype and (servers or keywords or synthetic):
        raise SearchError("--dtype is for transformers, not for --url, --engine or --synthetic")
    if dtype not in (None, "float32", "bfloat16"):
        raise SearchError(f"--dtype is float32 or bfloat16, got {dtype!r}")
    if synthetic and data.score:
        raise SearchError("--score chooses among a model's tokens; a made-up landscape has none")
    if synthetic and model:
        raise SearchError("--synthetic makes the model up; leave --model away, or --synthetic")
    if synthetic:
        return Synthetic(synthetic, data)
    if model is None:
        raise SearchError("give the checkpoint's folder with --model")
    if servers:
        return Served(model, data, tuple(servers), load or ONE_CALL, _tell)
    if keywords:
        return InProcess(model, data, lambda: _engine(model, keywords))
    return Local(model, data, dtype or "float32")


def _load(
    servers: Sequence[Engine],
    timeout: float | None,
    at_once: int | None = None,
    low_priority: bool = False,
) -> LoadPolicy:
    """How to ask the servers, of which there must be some to ask in any way."""
    from sglang_indexcache.ask.pool import LoadPolicy

    asked = {"--timeout": timeout, "--at-once": at_once, "--low-priority": low_priority}
    if not servers and (flag := next((flag for flag, value in asked.items() if value), None)):
        raise SearchError(f"{flag} is for the servers of --url")
    return LoadPolicy(timeout, at_once or 1, low_priority)


def _tell(line: str) -> None:
    out.print(f"[yellow]servers[/yellow]  {escape(line)}", highlight=False)


def _engine(model: Path, keywords: list[str]) -> AbstractContextManager[Engine]:
    from sglang_indexcache.serving.in_process import InProcessEngine

    pairs = (name_and_value(text, "--engine") for text in keywords if text != "default")
    values = {name: json_or_text(value) for name, value in pairs}
    return InProcessEngine(model_path=str(model), **values)


def _length(context: str | None) -> int | None:
    return None if context is None else parse_length(context)


def _score(text: str | None) -> Score | None:
    from sglang_indexcache.search.objective import Score

    return None if text is None else Score.parse(text)


def _label(value: str) -> str:
    """What a user wrote, short enough for a legend: a file's name without its folder."""
    return Path(value).stem if value.endswith((".yaml", ".yml")) else value
