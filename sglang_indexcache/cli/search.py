"""``indexcache search``: find a pattern for a checkpoint, and compare patterns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape
from typer import Argument, Option

from sglang_indexcache.cli.common import (
    DOCUMENTS,
    LENGTH,
    SERVERS,
    ApiKey,
    Command,
    Config,
    Figures,
    Model,
    Output,
    Seed,
    connect,
    group,
    out,
)
from sglang_indexcache.errors import SearchError, ServerUnavailableError
from sglang_indexcache.library.lengths import parse_length

if TYPE_CHECKING:
    from sglang_indexcache.lab.client.http import Client
    from sglang_indexcache.lab.client.score import Engine
    from sglang_indexcache.lab.search.calibration import Calibration, Score
    from sglang_indexcache.lab.search.evaluators import TokenEvaluator
    from sglang_indexcache.lab.search.methods import Method as SearchMethod
    from sglang_indexcache.lab.search.overlap import Block
    from sglang_indexcache.lab.search.setup import Setup
    from sglang_indexcache.library.resolve import Resolved

app = group("Find a pattern for your checkpoint, and compare patterns.")

# The panels of the help.
InServers = partial(Option, rich_help_panel=SERVERS)
InData = partial(Option, rich_help_panel="Data")
InSearch = partial(Option, rich_help_panel="Search")
InCost = partial(Option, rich_help_panel="Cost")

# fmt: off
Urls = Annotated[list[str] | None, InServers("--url", metavar="URL", help=
    "A running server in live mode. Repeat it: several share the work, and one may go and come "
    "back.")]
AtOnce = Annotated[int | None, InServers("--at-once", min=1, metavar="N", help=
    "Calls that each server has at the same time, one by default. A server with data-parallel "
    "ranks can do with as many.")]
LowPriority = Annotated[bool, InServers("--low-priority", help=
    "Let other requests of the servers go first. It needs servers with "
    "--enable-priority-scheduling.")]
Dtype = Annotated[str | None, Option("--dtype", metavar="float32|bfloat16", help=
    "Without --url, transformers runs the model in this process: in float32, if not said.")]
Data = Annotated[str, InData("--data", metavar="PATH", help=
    f"Documents to measure on: {DOCUMENTS}")]
Context = Annotated[str | None, InData("--context", metavar="LENGTH", help=
    f"Most tokens of a document: {LENGTH} It must be longer than what a query selects; the default "
    "is 8 times that (16Ki for released models).")]
WhichTokens = Annotated[str | None, InData("--score", metavar="WHICH", help=
    "Which tokens' loss counts: answers; late (the later half of each document); recall (late, and "
    "passages of the document that come again at its end); or all. The default is answers where "
    "the data marks them, else recall.")]
Batches = Annotated[int, InData("--batches", metavar="N", help=
    "Documents to search on, a batch each.")]
FurtherDocuments = Annotated[int | None, InData("--held-out", metavar="N", help=
    "Further documents. Found patterns are measured on them, none is chosen by them. The default "
    "is 128, or as many as the data has from 32 on; for one-pass and similarity, which measure no "
    "loss, 0. With few, a loss that few documents show goes unseen.")]
Target = Annotated[list[str] | None, InSearch("--target", metavar="TARGET", help=
    "Where to leave a pattern: a ratio such as 1/4, or a count of F layers. Repeat it. "
    "The default is 1/2, 1/4 and 1/8.")]
Method = Annotated[str | None, InSearch("--method", metavar="METHOD", help=
    "How to search: both (fast and forward, after one-pass if that can see; the default where the "
    "budget allows it), fast, forward, greedy; one-pass (by attention; with --url by lists, of "
    "servers with --enable-return-indexer-topk); or without --url similarity (of outputs).")]
Budget = Annotated[float | None, InSearch("--budget", metavar="SHARE", help=
    "The most that the search may forward, in shares of exhaustive greedy's tokens. The default "
    "is 0.1 for each of fast and forward, and more for few layers.")]
KeepFull = Annotated[str, InSearch("--keep-full", metavar="LAYERS", help=
    "Layers that stay F, such as 3,5,10-12.")]
DryRun = Annotated[bool, InCost("--dry-run", help=
    "Read the data, say what the search would do and cost, and end.")]
TokensPerSecond = Annotated[float | None, InCost("--rate", min=1.0, metavar="TOKENS", help=
    "Tokens that all servers together prefill in a second at this context, to foretell hours.")]
Compared = Annotated[list[str], Argument(metavar="[NAME=]PATTERN", help=
    "Two patterns or more, in any form, NAME for the results. The first is the reference.")]
ComparedDocuments = Annotated[int | None, InData("--held-out", metavar="N", help=
    "Documents to compare on, of those that a search holds out; two at least. The default is 128, "
    "or as many as the data has from 32 on. Fewer than 32 exclude no loss.")]
Pattern = Annotated[str, Option("--pattern", metavar="PATTERN", help=
    "A pattern, in any form, whose blocks are drawn on the heatmap.")]
MeasuredDocuments = Annotated[int, InData("--batches", metavar="N", help=
    "Documents to measure on.")]
ReturningUrl = Annotated[str, InServers("--url", metavar="URL", help=
    "A server that returns what layers select (--enable-return-indexer-topk). Without it, "
    "transformers runs the model in this process. A key is read from SGLANG_API_KEY.")]
# fmt: on


@app.command("run", cls=Command)
def run_command(
    output: Output,
    model: Model,
    config: Config = None,  # noqa: ARG001
    url: Urls = None,
    api_key: ApiKey = None,
    dtype: Dtype = None,
    at_once: AtOnce = None,
    low_priority: LowPriority = False,
    data: Data = "machine",
    context: Context = None,
    score: WhichTokens = None,
    batches: Batches = 16,
    held_out: FurtherDocuments = None,
    seed: Seed = 0,
    target: Target = None,
    method: Method = None,
    budget: Budget = None,
    keep_full: KeepFull = "",
    dry_run: DryRun = False,
    rate: TokensPerSecond = None,
    figures: Figures = "png",
) -> None:
    """Find which layers can lose their indexer. Start it again after any stop: it resumes.

    Example: indexcache search run --model MODEL --url http://127.0.0.1:30000 --data chats.jsonl
    -o found/
    """
    from sglang_indexcache.lab.runs.cost import Rate, print_plan
    from sglang_indexcache.lab.search.options import Options
    from sglang_indexcache.lab.search.rules import Constraints, parse_layers, parse_targets
    from sglang_indexcache.lab.search.session import plan, run_search
    from sglang_indexcache.lab.search.setup import Setup

    servers = connect(url, api_key)
    methods = _methods(servers, dry_run=dry_run)
    options = Options.parse(method, budget, methods=methods) if method else None
    measuring = _measuring(model, servers, dtype, at_once, low_priority)
    if held_out is None and options is not None and not options.method.by_loss:
        held_out = 0  # a check takes many times what such a search does
    setup = Setup.read(
        model,
        data,
        context=_length(context),
        batches=batches,
        held_out=held_out,
        seed=seed,
        score=_score(score),
    )
    rules = Constraints.make(setup.checkpoint.own, parse_layers(keep_full))
    targets = parse_targets(target, rules)
    tokens = setup.calibration.batch_tokens
    if options is None:
        options, why = Options.best(targets, tokens[:batches], budget, methods)
        if why:
            out.print(why, highlight=False)
    prefill_rate = Rate(rate, "given by --rate") if rate else None
    if dry_run:
        print_plan(out, plan(setup, targets, options, prefill_rate))
    else:
        evaluator = measuring(setup.calibration)
        run_search(setup, evaluator, targets, options, output, out, prefill_rate, figures)


@app.command("compare", cls=Command)
def compare_command(
    patterns: Compared,
    output: Output,
    model: Model,
    url: Urls = None,
    api_key: ApiKey = None,
    dtype: Dtype = None,
    at_once: AtOnce = None,
    low_priority: LowPriority = False,
    data: Data = "machine",
    context: Context = None,
    score: WhichTokens = None,
    held_out: ComparedDocuments = None,
) -> None:
    """Compare patterns on the held-out part of the data that a search would leave.

    Example: indexcache search compare full found/MODEL-1of4.yaml uniform:1/4 --model MODEL
    --url http://127.0.0.1:30000 --data chats.jsonl -o compared/
    """
    from sglang_indexcache.lab.runs.cost import print_plan
    from sglang_indexcache.lab.search.compare import compare
    from sglang_indexcache.lab.search.setup import Setup
    from sglang_indexcache.library.resolve import name_and_pattern
    from sglang_indexcache.library.writing import write_json

    if len(patterns) < 2:
        raise SearchError("give at least two patterns; the first is the reference")
    if held_out is not None and held_out < 2:
        raise SearchError("a comparison needs at least two held-out documents (--held-out)")
    reference_title, *titles = [name_and_pattern(value)[0] for value in patterns]
    reference, *candidates = _resolve(model, patterns)
    servers = connect(url, api_key)
    measuring = _measuring(model, servers, dtype, at_once, low_priority)
    read = Setup.read(
        model, data, context=_length(context), batches=1, held_out=held_out, score=_score(score)
    )
    setup = replace(read, calibration=read.calibration.held_out_alone())
    print_plan(out, setup.rows)
    evaluator = measuring(setup.calibration)
    identity = setup.identity(evaluator)
    with out.status("measuring ..."):
        patterns_compared = [each.pattern for each in candidates]
        comparisons = compare(
            evaluator, reference.pattern, patterns_compared, setup.calibration.batch_counted
        )
    named = list(zip(titles, comparisons, strict=True))
    verdicts = [(f"{title} against {reference_title}", result.verdict) for title, result in named]
    print_plan(out, verdicts)
    facts = {
        "reference": reference_title,
        "identity": identity,
        "data": setup.data,
        "documents": setup.calibration.reading,
        "comparisons": [{"name": title, **result.numbers()} for title, result in named],
    }
    write_json(output / "compare.json", facts)
    out.print(f"the numbers are in {output / 'compare.json'}")


@app.command("overlap", cls=Command)
def overlap_command(
    output: Output,
    model: Model,
    pattern: Pattern = "",
    data: Data = "machine",
    context: Context = None,
    batches: MeasuredDocuments = 4,
    url: ReturningUrl = "",
    figures: Figures = "png",
) -> None:
    """Measure how much of their selection every two layers have in common.

    Example: indexcache search overlap --model MODEL --data chats.jsonl -o overlap/
    """
    import numpy as np

    from sglang_indexcache.checkpoint import fp8_blocks
    from sglang_indexcache.lab.runs.cost import print_plan
    from sglang_indexcache.lab.runs.progress import progress_at_most
    from sglang_indexcache.lab.search.calibration import Score
    from sglang_indexcache.lab.search.overlap import (
        CopyCounter,
        OverlapCounter,
        best_patterns,
        draw_overlap,
        earlier_places,
        numbers,
        overlap_in_words,
    )
    from sglang_indexcache.lab.search.setup import Setup
    from sglang_indexcache.library.writing import write_json

    if not url:
        fp8_blocks(model)
    setup = Setup.read(model, data, context=_length(context), batches=batches, score=Score.ALL)
    drawn = setup.resolve(pattern) if pattern else None
    blocks, kind = _selections(setup, model, url)
    topk = int(setup.checkpoint.shape["index_topk"])
    counter = OverlapCounter(setup.checkpoint.num_layers, topk)
    copies = CopyCounter(setup.checkpoint.num_layers)
    with progress_at_most(out) as progress:
        for ids in progress.track(setup.calibration.sequences, description="measuring"):
            sources = earlier_places(ids, first=topk)
            for start, lists in blocks(ids):
                counter.add(lists, start)
                copies.add(lists, start, sources)
    out.print(overlap_in_words(counter.matrix()), highlight=False)
    patterns = best_patterns(np.tril(counter.matrix() - copies.lost()), setup.checkpoint.own)
    print_plan(out, patterns.items())
    out.print("These keep most of the lists and of what is copied; no loss was measured.")
    identity = {"by": kind, "checkpoint": setup.digest, "data": setup.calibration.digest}
    facts = {"identity": identity, "data": setup.data}
    write_json(output / "overlap.json", {**facts, **numbers(counter), "patterns": patterns})
    draw_overlap(counter.matrix(), output / f"overlap.{figures}", drawn)
    out.print(f"numbers and figure are in {output}")


def _selections(
    setup: Setup, model: Path, url: str
) -> tuple[Callable[[tuple[int, ...]], Iterator[Block]], str]:
    """Return what gives the lists of a document's layers in blocks of rows, and what it is called.

    A server at ``url`` gives them; without one, transformers.
    """
    from sglang_indexcache.lab.search.evaluators.hf import TransformersEvaluator
    from sglang_indexcache.lab.search.overlap import served_lists

    if url:
        [server] = connect([url], os.environ.get("SGLANG_API_KEY"))
        return served_lists(server, setup.checkpoint), "sglang"
    evaluator = TransformersEvaluator(model, setup.calibration)
    return lambda ids: iter([(0, evaluator.selected(ids))]), evaluator.kind


def _measuring(
    model: Path,
    servers: Sequence[Engine],
    dtype: str | None,
    at_once: int | None,
    low_priority: bool,
) -> Callable[[Calibration], TokenEvaluator]:
    """Choose the evaluator by a command's options; nothing is loaded or asked yet."""
    from sglang_indexcache.checkpoint import Checkpoint, fp8_blocks
    from sglang_indexcache.lab.client.pool import Pool
    from sglang_indexcache.lab.search.overlap import ReturningEvaluator

    server_options = {"--at-once": at_once, "--low-priority": low_priority}
    if servers:
        if dtype:
            raise SearchError("--dtype is for transformers; a server has its own")
        load: dict[str, Any] = {"at_once": at_once or 1, "low_priority": low_priority}
        checkpoint = Checkpoint.read(model)
        return lambda data: ReturningEvaluator(Pool(servers, tell=_tell, **load), data, checkpoint)
    if flag := next((flag for flag, value in server_options.items() if value), None):
        raise SearchError(f"{flag} is for the servers of --url")
    if dtype not in (None, "float32", "bfloat16"):
        raise SearchError(f"--dtype is float32 or bfloat16, got {dtype!r}")
    fp8_blocks(model)

    def local(data: Calibration) -> TokenEvaluator:
        from sglang_indexcache.lab.search.evaluators.hf import TransformersEvaluator

        return TransformersEvaluator(model, data, dtype or "float32")

    return local


def _methods(servers: Sequence[Client], *, dry_run: bool) -> Mapping[str, SearchMethod]:
    """Return the methods that see what this process, or the servers, can show."""
    from sglang_indexcache.lab.search.methods import METHODS, METHODS_FROM_LISTS, METHODS_IN_PROCESS

    if not servers:
        return METHODS_IN_PROCESS
    # A dry run asks no server.
    return METHODS_FROM_LISTS if not dry_run and _return_lists(servers) else METHODS


def _return_lists(servers: Sequence[Client]) -> bool:
    """Return whether the servers that answer return what their layers select, all of them."""
    returning = []
    for server in servers:
        with suppress(ServerUnavailableError):
            returning.append(bool(server.server_info().get("enable_return_indexer_topk")))
    return bool(returning) and all(returning)


def _resolve(model: Path, patterns: Sequence[str]) -> list[Resolved]:
    """Resolve what is to be compared."""
    from sglang_indexcache.checkpoint import Checkpoint
    from sglang_indexcache.library.resolve import Library, name_and_pattern

    checkpoint, library = Checkpoint.read(model), Library.default()
    written = [name_and_pattern(value)[1] for value in patterns]
    return [library.resolve(value, checkpoint) for value in written]


def _tell(line: str) -> None:
    out.print(f"[yellow]servers[/yellow]  {escape(line)}", highlight=False)


def _length(context: str | None) -> int | None:
    return None if context is None else parse_length(context)


def _score(text: str | None) -> Score | None:
    from sglang_indexcache.lab.search.calibration import Score

    return None if text is None else Score.parse(text)
