"""``indexcache search run``: find patterns and compare them."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from sglang_indexcache.cli.common import group, json_or_text, name_and_value, out
from sglang_indexcache.errors import SearchError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.calibration import DEFAULT_DATA
from sglang_indexcache.search.constraints import Constraints, stage_starts
from sglang_indexcache.search.cost import cost
from sglang_indexcache.search.evaluators.served import LiveEngine
from sglang_indexcache.search.ledger import Ledger
from sglang_indexcache.search.path import Step
from sglang_indexcache.search.run import Found, Method, Options, Search
from sglang_indexcache.search.setup import Setup, Source, open_source
from sglang_indexcache.search.targets import Targets, parse_targets

app = group("Find a pattern for your checkpoint, and compare patterns.")

ModelOption = Annotated[
    Path | None,
    typer.Option(help="Checkpoint folder: tokenizer, hash, weights."),
]
UrlOption = Annotated[
    list[str] | None,
    typer.Option(help="A server in live mode; repeat it to measure several candidates at a time."),
]
EngineOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Start SGLang in this process: a keyword of sglang.Engine such as tp_size=8; "
        "repeat it. 'default' for none."
    ),
]
SyntheticOption = Annotated[
    int, typer.Option(help="Layers of a made-up landscape: to try the tool without a model.")
]
DataOption = Annotated[
    str, typer.Option(help="A .jsonl, .parquet or text file, a folder, or 'machine'.")
]
ContextOption = Annotated[int, typer.Option(help="Tokens in a calibration sequence.")]
BatchesOption = Annotated[int, typer.Option(help="Calibration batches.")]
PerBatchOption = Annotated[int, typer.Option(help="Sequences in a batch.")]
HeldOutOption = Annotated[int, typer.Option(help="Further batches, kept away from the search.")]
SeedOption = Annotated[int, typer.Option(help="Of the data's shuffle.")]
DtypeOption = Annotated[str, typer.Option(help="For transformers: float32 or bfloat16.")]
TargetOption = Annotated[
    list[str] | None,
    typer.Option("--target", help="1/4, a count of F layers, or a loss budget like +0.5%; repeat."),
]
LayersOption = Annotated[str, typer.Option(help="Layers, such as 3,5,10-12.")]


def _start_engine(model: Path, keywords: Sequence[str]) -> AbstractContextManager[LiveEngine]:
    from sglang_indexcache.serving.in_process import InProcessEngine

    pairs = (name_and_value(text, "--engine") for text in keywords if text != "default")
    values = {name: json_or_text(value) for name, value in pairs}
    return InProcessEngine(model_path=str(model), **values)


@app.command("run")
def search_command(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for everything.")],
    model: ModelOption = None,
    url: UrlOption = None,
    engine: EngineOption = None,
    synthetic: SyntheticOption = 0,
    data: DataOption = DEFAULT_DATA,
    context: ContextOption = 2048,
    batches: BatchesOption = 16,
    per_batch: PerBatchOption = 1,
    held_out: HeldOutOption = 8,
    seed: SeedOption = 0,
    dtype: DtypeOption = "float32",
    target: TargetOption = None,
    method: Annotated[str, typer.Option(help="fast, greedy or similarity.")] = "fast",
    refine: Annotated[str, typer.Option(help="none, screened, swap or beam.")] = "screened",
    budget: Annotated[float, typer.Option(help="Of fast, in shares of exhaustive greedy.")] = 0.1,
    beam_width: Annotated[int, typer.Option(help="Of --refine beam.")] = 4,
    blocks: Annotated[int, typer.Option(help="Pipeline blocks of --method greedy.")] = 1,
    keep_full: LayersOption = "",
    force_shared: LayersOption = "",
    stages: Annotated[int, typer.Option(help="Pipeline stages whose first layer stays F.")] = 1,
    name: Annotated[str, typer.Option(help="Prefix of the patterns' names.")] = "",
    delay: Annotated[float, typer.Option(hidden=True)] = 0.0,
) -> None:
    """Find which layers can lose their indexer. Start it again after any stop: it resumes."""
    options = Options(method, refine, blocks, budget, beam_width)  # type: ignore[arg-type]
    source = Source(
        model=model,
        urls=tuple(url or ()),
        engine=tuple(engine or ()),
        synthetic=synthetic,
        data=data,
        context=context,
        batches=batches,
        per_batch=per_batch,
        held_out=held_out,
        seed=seed,
        dtype=dtype,
        delay=delay,
    )
    with open_source(source, _start_engine) as setup:
        constraints = Constraints.make(
            setup.own,
            _layers(keep_full),
            _layers(force_shared),
            stage_starts(len(setup.own), stages),
        )
        targets = parse_targets(target or ["1/2", "1/4", "1/8"], constraints)
        run_search(setup, constraints, targets, options, output, name)


def run_search(
    setup: Setup,
    constraints: Constraints,
    targets: Targets,
    options: Options,
    output: Path,
    name: str = "",
) -> Search:
    """Search with progress, journal and figures; leaves whatever was found on any interruption."""
    from sglang_indexcache.search.journal import Journal
    from sglang_indexcache.search.output import OutputFolder

    # A batch system ends a job with SIGTERM: the same as Ctrl-C here.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Journal(output / "journal.jsonl", setup.identity) as journal, _progress() as progress:
        ledger = Ledger(setup.evaluator, journal)
        search = Search(ledger, constraints, targets, options)
        task = progress.add_task(
            "measuring the start", total=search.expected_tokens, completed=ledger.known_tokens
        )
        ledger.on_measured = lambda _: progress.update(task, completed=ledger.known_tokens)
        if journal.records:
            out.print(f"resuming: {len(journal.records)} finished evaluations in {journal.path}")
        folder = OutputFolder(output, search, setup.provenance(name))
        try:
            for event in search.run():
                _show(event, search)
                words = f"{len(search.path) - 1} layers shared"
                progress.update(task, description=words)
                folder.update(event)
        except KeyboardInterrupt:
            folder.finish()
            out.print(f"interrupted: partial results are in {output}; the same command goes on")
            raise typer.Exit(130) from None
    folder.finish()
    _show_result(search)
    out.print(f"everything is in {output}")
    return search


@contextmanager
def _progress() -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("left at most"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=out, transient=True) as progress:
        yield progress


def _show(event: Step | Found, search: Search) -> None:
    if isinstance(event, Found) or event.layer is None:
        return
    added = 100 * (event.loss / search.start_loss - 1)
    sure = "" if event.decided else "  (undecided: no budget left to tell the best apart)"
    full = len(event.pattern.full_layers)
    out.print(
        f"{full:>4} F  layer {event.layer:>3} -> S  loss {event.loss:.5f} "
        f"({added:+.3f} %, {event.batches} batches, {event.candidates} candidates){sure}",
        highlight=False,
    )


def _show_result(search: Search) -> None:
    table = Table(
        "retention", "F", "loss", "over start", "refined by", "uniform", "pattern", box=SIMPLE
    )
    for found in search.found.values():
        uniform = found.baselines.get("uniform")
        table.add_row(
            found.mark.label,
            str(len(found.pattern.full_layers)),
            f"{found.loss:.5f}",
            f"{100 * (found.loss / search.start_loss - 1):+.3f} %",
            f"{found.gained:.5f}",
            f"{uniform[1]:.5f}" if uniform else "",
            str(found.pattern),
        )
    table.columns[-1].overflow = "fold"
    out.print(table)
    share = search.search_tokens / search.exhaustive_tokens
    out.print(
        f"loss with every indexer: {search.start_loss:.5f} nats per token; tokens forwarded: "
        f"{search.search_tokens:,} ({100 * share:.1f} % of exhaustive greedy's)"
    )


@app.command("compare")
def compare_command(
    patterns: Annotated[
        list[str], typer.Argument(help="Two or more; the first is the reference. As when serving.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for numbers and figure.")],
    model: ModelOption = None,
    url: UrlOption = None,
    engine: EngineOption = None,
    data: DataOption = DEFAULT_DATA,
    context: ContextOption = 2048,
    batches: BatchesOption = 16,
    per_batch: PerBatchOption = 1,
    held_out: HeldOutOption = 8,
    seed: SeedOption = 0,
    dtype: DtypeOption = "float32",
    buckets: Annotated[int, typer.Option(help="Points of the curve along the context.")] = 8,
) -> None:
    """Compare patterns on the held-out part of the data that a search would leave."""
    from sglang_indexcache.search.compare import compare
    from sglang_indexcache.search.figures import draw_comparison
    from sglang_indexcache.search.output import comparison_data
    from sglang_indexcache.support.files import write_json

    if len(patterns) < 2:
        raise SearchError("give at least two patterns; the first is the reference")
    if held_out < 2:
        raise SearchError("a comparison needs at least two held-out batches (--held-out)")
    source = Source(
        model=model,
        urls=tuple(url or ()),
        engine=tuple(engine or ()),
        data=data,
        context=context,
        batches=batches,
        per_batch=per_batch,
        held_out=held_out,
        seed=seed,
        dtype=dtype,
        use_held_out=True,
    )
    with open_source(source, _start_engine) as setup, out.status("measuring ..."):
        parsed = [setup.resolve(value) for value in patterns]
        found = compare(setup.token_evaluator, parsed[0], parsed[1:], buckets)
    reference, *others = [_label(value) for value in patterns]
    named = list(zip(others, found, strict=True))
    for title, comparison in named:
        out.print(f"{title} against {reference}: {comparison.verdict}", highlight=False)
    write_json(output / "compare.json", comparison_data(named, reference, setup))
    draw_comparison(named, output / "compare.png")
    out.print(f"numbers and figure are in {output}")


@app.command("overlap")
def overlap_command(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for numbers and figure.")],
    model: ModelOption = None,
    pattern: Annotated[str, typer.Option(help="Draw its blocks on the heatmap.")] = "",
    data: DataOption = DEFAULT_DATA,
    context: ContextOption = 2048,
    batches: BatchesOption = 4,
    per_batch: PerBatchOption = 1,
    seed: SeedOption = 0,
    dtype: DtypeOption = "float32",
) -> None:
    """Measure how much of their selection every two layers have in common."""
    from sglang_indexcache.search.figures import draw_overlap
    from sglang_indexcache.search.output import measure_overlap, overlap_data
    from sglang_indexcache.search.overlap import read
    from sglang_indexcache.support.files import write_json

    source = Source(
        model=model,
        data=data,
        context=context,
        batches=batches,
        per_batch=per_batch,
        held_out=0,
        seed=seed,
        dtype=dtype,
    )
    with open_source(source, _start_engine) as setup:
        drawn = setup.resolve(pattern) if pattern else None
        with _progress() as progress:
            task = progress.add_task("measuring", total=batches)
            counter = measure_overlap(setup, lambda: progress.advance(task))
    matrix = counter.matrix()
    out.print(read(matrix).in_words(), highlight=False)
    write_json(output / "overlap.json", overlap_data(counter, setup, drawn))
    draw_overlap(matrix, output / "overlap.png", drawn)
    out.print(f"numbers and figure are in {output}")


@app.command("stability")
def stability_command(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for everything.")],
    sets: Annotated[int, typer.Option(help="Disjoint calibration sets.")] = 3,
    model: ModelOption = None,
    url: UrlOption = None,
    engine: EngineOption = None,
    synthetic: SyntheticOption = 0,
    data: DataOption = DEFAULT_DATA,
    context: ContextOption = 2048,
    batches: BatchesOption = 16,
    per_batch: PerBatchOption = 1,
    seed: SeedOption = 0,
    dtype: DtypeOption = "float32",
    target: TargetOption = None,
    method: Annotated[str, typer.Option(help="fast or greedy.")] = "fast",
    budget: Annotated[float, typer.Option(help="Of fast, in shares of exhaustive greedy.")] = 0.1,
) -> None:
    """Search on several calibration sets; report how far the answers agree."""
    from sglang_indexcache.search.output import stability_data
    from sglang_indexcache.search.stability import agreement
    from sglang_indexcache.support.files import write_json

    if sets < 2:
        raise SearchError("stability needs at least two calibration sets (--sets)")
    options = Options(method, "none", 1, budget)  # type: ignore[arg-type]
    base: dict[str, Any] = {
        "model": model,
        "urls": tuple(url or ()),
        "engine": tuple(engine or ()),
        "synthetic": synthetic,
        "data": data,
        "context": context,
        "batches": batches * sets,
        "per_batch": per_batch,
        "held_out": 0,
        "dtype": dtype,
    }
    searches = []
    for number in range(sets):
        source = Source(**base, seed=seed, part=(number, sets))
        with open_source(source, _start_engine) as setup:
            constraints = Constraints.make(setup.own)
            targets = parse_targets(target or ["1/2", "1/4", "1/8"], constraints)
            folder = output / f"set-{number}"
            searches.append(run_search(setup, constraints, targets, options, folder))
    orders = [[s.layer for s in found.path if s.layer is not None] for found in searches]
    answers = [{f.mark.label: f.pattern for f in s.found.values()} for s in searches]
    result = agreement(orders, answers)
    write_json(output / "stability.json", stability_data(result, orders, answers))
    out.print(f"order of the flips: Kendall tau {result.kendall_tau:.3f} on average")
    for mark, share in result.common_full_layers.items():
        chance = result.expected_by_chance[mark]
        words = f"{100 * share:.0f} % of the F layers in common (chance: {100 * chance:.0f} %)"
        out.print(f"{mark}: {words}")


@app.command("cost")
def cost_command(
    layers: Annotated[int, typer.Option(help="Layers of the model.")],
    sequences: Annotated[int, typer.Option(help="Calibration sequences.")] = 768,
    context: Annotated[int, typer.Option(help="Tokens of each.")] = 200_000,
    target: TargetOption = None,
    rate: Annotated[float, typer.Option(help="Prefill, tokens a second of the engine.")] = 0.0,
    gpus: Annotated[int, typer.Option(help="GPUs of that engine.")] = 8,
    budget: Annotated[float, typer.Option(help="Of fast, in shares of exhaustive greedy.")] = 0.1,
    blocks: Annotated[int, typer.Option(help="Pipeline blocks of greedy.")] = 1,
) -> None:
    """Predict what a search costs, before it runs."""
    constraints = Constraints.make(Pattern.full(layers))
    targets = parse_targets(target or ["1/2", "1/4", "1/8"], constraints)
    methods: tuple[Method, ...] = ("greedy", "fast")
    table = Table("method", "full evaluations", "forward passes", "tokens", "hours", "GPU-hours")
    for method in methods:
        bill = cost(
            constraints,
            targets,
            method=method,
            sequences=sequences,
            context=context,
            share=budget,
            blocks=blocks,
            tokens_per_second=rate or None,
            gpus=gpus,
        )
        hours = (_figure(bill.hours), _figure(bill.gpu_hours))
        table.add_row(
            f"{'at most ' if method == 'fast' else ''}{method}",
            f"{bill.evaluations:,.0f}",
            f"{bill.sequences:,.0f}",
            f"{bill.tokens:.3g}",
            *hours,
        )
    out.print(table)


def _label(value: str) -> str:
    """What a user wrote, short enough for a legend: a file's name without its folder."""
    return Path(value).stem if value.endswith((".yaml", ".yml")) else value


def _figure(value: float | None) -> str:
    return f"{value:,.1f}" if value is not None else "give --rate"


def _layers(text: str) -> list[int]:
    """``3,5,10-12`` as numbers."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise SearchError(f"{text!r} is not a list of layers such as 3,5,10-12")
        found += range(int(first), int(last or first) + 1)
    return found
