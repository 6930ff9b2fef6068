"""``indexcache search``: find a pattern for a checkpoint, and compare patterns."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
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
from sglang_indexcache.support.lengths import parse_length

if TYPE_CHECKING:
    from sglang_indexcache.ask.client import Client
    from sglang_indexcache.ask.score import Engine
    from sglang_indexcache.library import Resolved, Slopes
    from sglang_indexcache.search.calibration import Calibration, Score
    from sglang_indexcache.search.evaluators import TokenEvaluator

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
SlopesFile = Annotated[Path | None, InSearch("--slopes", metavar="FILE", help=
    "Let layers be L, too, which fold by these slopes (`indexcache fold calibrate`). A target is "
    "then a budget: 1/4 of what all F cost. By one-pass alone, without --url.")]
FoldPrice = Annotated[float | None, InSearch("--fold-price", metavar="PRICE", help=
    "What an L layer costs, where F costs 1 and S nothing. `indexcache bench plan --pattern "
    "folded` tells it of some hardware.")]
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
    "A pattern, in any form, whose blocks are drawn on the heatmap. If it is a YAML file, "
    "transformers also runs it, and what its layers have in common is written into the file, for "
    "servers to compare with.")]
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
    slopes: SlopesFile = None,
    fold_price: FoldPrice = None,
    dry_run: DryRun = False,
    rate: TokensPerSecond = None,
    figures: Figures = "png",
) -> None:
    """Find which layers can lose their indexer. Start it again after any stop: it resumes.

    Example: indexcache search run --model MODEL --url http://127.0.0.1:30000 --data chats.jsonl
    -o found/
    """
    from sglang_indexcache.search.methods import METHODS, METHODS_FROM_LISTS, METHODS_IN_PROCESS
    from sglang_indexcache.search.options import Options
    from sglang_indexcache.search.rules import Constraints, Folding, parse_layers, parse_targets
    from sglang_indexcache.search.session import plan, run_search
    from sglang_indexcache.search.setup import Setup
    from sglang_indexcache.study.cost import Rate, print_plan

    servers, methods = connect(url, api_key), METHODS_IN_PROCESS
    if url:  # a dry run asks no server
        methods = METHODS_FROM_LISTS if not dry_run and _return_lists(servers) else METHODS
    folding, method = _folding(model, slopes, fold_price, url, method)
    options = Options.parse(method, budget, methods=methods) if method else None
    measuring = _measuring(model, servers, dtype, at_once, low_priority, folding)
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
    constraints = Constraints.make(setup.checkpoint.own, parse_layers(keep_full))
    if folding is not None and fold_price is not None:
        layers = frozenset(i for i, numbers in enumerate(folding.by_layer) if numbers is not None)
        price = Fraction(str(fold_price))
        constraints = replace(constraints, folding=Folding(price, layers, folding.digest))
    targets = parse_targets(target, constraints)
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
        if folding is not None:  # a pattern names it by its digest, and it is looked for beside it
            folding.model_copy(update={"path": output / folding.path.name}).write()
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

    One that folds names its slopes: full+c4@MODEL.slopes.

    Example: indexcache search compare full found/MODEL-1of4.yaml uniform:1/4 --model MODEL
    --url http://127.0.0.1:30000 --data chats.jsonl -o compared/
    """
    from sglang_indexcache.library import name_and_pattern
    from sglang_indexcache.search.compare import compare
    from sglang_indexcache.search.setup import Setup
    from sglang_indexcache.study.cost import print_plan
    from sglang_indexcache.support.files import write_json

    if len(patterns) < 2:
        raise SearchError("give at least two patterns; the first is the reference")
    if held_out is not None and held_out < 2:
        raise SearchError("a comparison needs at least two held-out documents (--held-out)")
    reference_title, *titles = [name_and_pattern(value)[0] for value in patterns]
    (reference, *candidates), slopes = _resolve(model, patterns)
    servers = connect(url, api_key)
    measuring = _measuring(model, servers, dtype, at_once, low_priority, slopes)
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

    from sglang_indexcache.search.calibration import Score
    from sglang_indexcache.search.evaluators.hf import TransformersEvaluator
    from sglang_indexcache.search.overlap import (
        CopyCounter,
        OverlapCounter,
        best_patterns,
        draw_overlap,
        earlier_places,
        numbers,
        overlap_in_words,
        served_lists,
    )
    from sglang_indexcache.search.setup import Setup
    from sglang_indexcache.study.cost import print_plan
    from sglang_indexcache.study.journal import progress_at_most
    from sglang_indexcache.support.files import write_json

    setup = Setup.read(model, data, context=_length(context), batches=batches, score=Score.ALL)
    drawn = setup.resolve(pattern) if pattern else None
    if url:
        [server] = connect([url], os.environ.get("SGLANG_API_KEY"))
        blocks, kind = served_lists(server, setup.checkpoint), "sglang"
    else:
        evaluator = TransformersEvaluator(model, setup.calibration)
        blocks, kind = lambda ids: iter([(0, evaluator.selected(ids))]), evaluator.kind
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


def _measuring(
    model: Path,
    servers: Sequence[Engine],
    dtype: str | None,
    at_once: int | None,
    low_priority: bool,
    slopes: Slopes | None = None,
) -> Callable[[Calibration], TokenEvaluator]:
    """Choose the evaluator by a command's options; nothing is loaded or asked yet."""
    from sglang_indexcache.ask.pool import Pool
    from sglang_indexcache.checkpoint import Checkpoint
    from sglang_indexcache.search.overlap import ReturningEvaluator

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

    def local(data: Calibration) -> TokenEvaluator:
        from sglang_indexcache.search.evaluators.hf import TransformersEvaluator

        return TransformersEvaluator(model, data, dtype or "float32", slopes=slopes)

    return local


def _return_lists(servers: Sequence[Client]) -> bool:
    """Return whether the servers that answer return what their layers select, all of them."""
    returning = []
    for server in servers:
        with suppress(ServerUnavailableError):
            returning.append(bool(server.server_info().get("enable_return_indexer_topk")))
    return bool(returning) and all(returning)


def _resolve(model: Path, patterns: Sequence[str]) -> tuple[list[Resolved], Slopes | None]:
    """Resolve what is to be compared, and the slopes by which any of it folds."""
    from sglang_indexcache.checkpoint import Checkpoint
    from sglang_indexcache.library import Library, name_and_pattern
    from sglang_indexcache.study.provenance import checkpoint_digest

    checkpoint, library = Checkpoint.read(model), Library.default()
    written = [name_and_pattern(value)[1] for value in patterns]
    resolved = [library.resolve(value, checkpoint, folding=True) for value in written]
    slopes = next((each.slopes for each in resolved if each.slopes is not None), None)
    if slopes is not None:
        slopes.check_checkpoint(checkpoint_digest(model), str(model))
    return resolved, slopes


def _folding(
    model: Path, path: Path | None, price: float | None, url: list[str] | None, method: str | None
) -> tuple[Slopes | None, str | None]:
    """Return the slopes of a search that may fold, and its method."""
    if path is None and price is None:
        return None, method
    if path is None or price is None:
        raise SearchError(
            "L layers need both their slopes (--slopes FILE, of `indexcache fold calibrate`) and "
            "their price (--fold-price). Give both, or neither for a search over F and S."
        )
    if url:
        raise SearchError(
            "a search over L layers looks into the model's layers, which a server does not show. "
            "Leave out --url, so that transformers runs the model in this process."
        )
    if method not in (None, "one-pass"):
        raise SearchError(f"--method {method} knows F and S alone; with --slopes say one-pass")
    from sglang_indexcache.library import Slopes
    from sglang_indexcache.study.provenance import checkpoint_digest

    slopes = Slopes.read(path)
    slopes.check_checkpoint(checkpoint_digest(model), str(model))
    return slopes, "one-pass"


def _tell(line: str) -> None:
    out.print(f"[yellow]servers[/yellow]  {escape(line)}", highlight=False)


def _length(context: str | None) -> int | None:
    return None if context is None else parse_length(context)


def _score(text: str | None) -> Score | None:
    from sglang_indexcache.search.calibration import Score

    return None if text is None else Score.parse(text)
