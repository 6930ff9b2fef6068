"""``indexcache search``: find a pattern for a checkpoint, and compare patterns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from sglang_indexcache.errors import SearchError
from sglang_indexcache.library.lengths import parse_length

if TYPE_CHECKING:
    from sglang_indexcache.lab.client.score import Engine
    from sglang_indexcache.lab.search.calibration import Calibration, Score
    from sglang_indexcache.lab.search.evaluators import TokenEvaluator
    from sglang_indexcache.pattern import Pattern

app = group("Find a pattern for your checkpoint, and compare patterns.")

# Panels of the help.
InServers = partial(Option, rich_help_panel=SERVERS)
InData = partial(Option, rich_help_panel="Data")
InSearch = partial(Option, rich_help_panel="Search")

# fmt: off
Urls = Annotated[list[str] | None, InServers("--url", metavar="URL", help=
    "A running server in live mode. Repeat it: several share the work, and one may go and come "
    "back.")]
AtOnce = Annotated[int | None, InServers("--at-once", min=1, metavar="N", help=
    "Calls that each server has at the same time, one by default. A server with data-parallel "
    "ranks can do with as many.")]
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
    "is as many as --batches, or what the data has; for one-pass and similarity, which run no "
    "pattern, 0. With few, a loss that few documents show goes unseen.")]
Target = Annotated[list[str] | None, InSearch("--target", metavar="TARGET", help=
    "Where to leave a pattern: a ratio such as 1/4, or a count of F layers. Repeat it. "
    "The default is what can be reached of 1/2, 1/4 and 1/8.")]
Method = Annotated[str | None, InSearch("--method", metavar="METHOD", help=
    "How to search. The default, proposals, runs some patterns that one pass proposes, and then "
    "exchanges of layers that promise most; loss decides. one-pass alone runs none (it goes by "
    "attention; with --url by lists); greedy is the paper's Algorithm 1, similarity the paper's of "
    "outputs, without --url. Servers need --enable-return-indexer-topk, but for greedy.")]
KeepFull = Annotated[str, InSearch("--keep-full", metavar="LAYERS", help=
    "Layers that stay F, such as 3,5,10-12.")]
DryRun = Annotated[bool, InSearch("--dry-run", help=
    "Read the data, say what the search would do and cost, and end.")]
Compared = Annotated[list[str], Argument(metavar="[NAME=]PATTERN", help=
    "Two patterns or more, in any form, NAME for the results. The first is the reference.")]
ComparedDocuments = Annotated[int | None, InData("--held-out", metavar="N", help=
    "Documents to compare on, of those that a search holds out; two at least. The default is 128, "
    "or as many as the data has. Fewer than 32 exclude no loss.")]
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
    data: Data = "machine",
    context: Context = None,
    score: WhichTokens = None,
    batches: Batches = 16,
    held_out: FurtherDocuments = None,
    seed: Seed = 0,
    target: Target = None,
    method: Method = None,
    keep_full: KeepFull = "",
    dry_run: DryRun = False,
    figures: Figures = "png",
) -> None:
    """Find which layers can lose their indexer. Start it again after any stop: it resumes.

    Example: indexcache search run --model MODEL --url http://127.0.0.1:30000 --data chats.jsonl
    -o found/
    """
    from sglang_indexcache.lab.runs.progress import print_plan
    from sglang_indexcache.lab.search.methods import (
        METHODS,
        METHODS_OF_SERVERS,
        find_method,
    )
    from sglang_indexcache.lab.search.rules import Constraints, parse_layers, parse_targets
    from sglang_indexcache.lab.search.session import plan, run_search
    from sglang_indexcache.lab.search.setup import Setup

    servers = connect(url, api_key)
    chosen = find_method(method, METHODS_OF_SERVERS if servers else METHODS)
    measuring = _measuring(model, servers, dtype, at_once)
    least_held_out = None
    if held_out is None:
        # A check takes many times as long as a search by pairs.
        held_out = batches if chosen.objective else 0
        least_held_out = 0
    elif held_out == 1:
        raise SearchError(
            "one held-out document shows no spread: give 0, or two or more (--held-out)"
        )
    setup = Setup.read(
        model,
        data,
        context=_length(context),
        batches=batches,
        held_out=held_out,
        least_held_out=least_held_out,
        seed=seed,
        score=_score(score),
    )
    rules = Constraints.make(setup.checkpoint.own, parse_layers(keep_full))
    targets = parse_targets(target, rules)
    if dry_run:
        print_plan(out, plan(setup, targets, chosen))
    else:
        evaluator = measuring(setup.calibration)
        run_search(setup, evaluator, targets, chosen, output, out, figures)


@app.command("compare", cls=Command)
def compare_command(
    patterns: Compared,
    output: Output,
    model: Model,
    url: Urls = None,
    api_key: ApiKey = None,
    dtype: Dtype = None,
    at_once: AtOnce = None,
    data: Data = "machine",
    context: Context = None,
    score: WhichTokens = None,
    held_out: ComparedDocuments = None,
) -> None:
    """Compare patterns on the held-out part of the data that a search would leave.

    Example: indexcache search compare full found/MODEL-1of4.yaml uniform:1/4 --model MODEL
    --url http://127.0.0.1:30000 --data chats.jsonl -o compared/
    """
    from sglang_indexcache.lab.runs.progress import print_plan
    from sglang_indexcache.lab.search.compare import compare
    from sglang_indexcache.lab.search.difference import HELD_OUT
    from sglang_indexcache.lab.search.setup import Setup
    from sglang_indexcache.library.writing import write_json

    if len(patterns) < 2:
        raise SearchError("give at least two patterns; the first is the reference")
    if held_out is not None and held_out < 2:
        raise SearchError("a comparison needs at least two held-out documents (--held-out)")
    (reference_title, reference), *named = _resolve(model, patterns)
    servers = connect(url, api_key)
    measuring = _measuring(model, servers, dtype, at_once)
    read = Setup.read(
        model,
        data,
        context=_length(context),
        batches=1,
        held_out=HELD_OUT if held_out is None else held_out,
        least_held_out=2 if held_out is None else None,
        score=_score(score),
    )
    setup = replace(read, calibration=read.calibration.held_out_alone())
    print_plan(out, setup.rows)
    evaluator = measuring(setup.calibration)
    identity = setup.identity(evaluator)
    with out.status("measuring ..."):
        results = compare(evaluator, reference, [pattern for _, pattern in named])
    compared = [(title, result) for (title, _), result in zip(named, results, strict=True)]
    verdicts = [(f"{title} against {reference_title}", each.verdict) for title, each in compared]
    print_plan(out, verdicts)
    facts = {
        "reference": reference_title,
        "identity": identity,
        "data": setup.data,
        "documents": setup.calibration.reading,
        "comparisons": [{"name": title, **each.numbers()} for title, each in compared],
    }
    write_json(output / "compare.json", facts)
    out.print(f"the numbers are in {output / 'compare.json'}")


def _measuring(
    model: Path,
    servers: Sequence[Engine],
    dtype: str | None,
    at_once: int | None,
) -> Callable[[Calibration], TokenEvaluator]:
    """Choose the evaluator from a command's options, without loading or asking anything yet."""
    from sglang_indexcache.checkpoint import Checkpoint, fp8_blocks
    from sglang_indexcache.lab.client.pool import Pool
    from sglang_indexcache.lab.search.lists import ReturningEvaluator

    if servers:
        if dtype:
            raise SearchError("--dtype is for transformers; a server has its own")
        calls, checkpoint = at_once or 1, Checkpoint.read(model)
        return lambda data: ReturningEvaluator(
            Pool(servers, at_once=calls, tell=_tell), data, checkpoint
        )
    if at_once:
        raise SearchError("--at-once is for the servers of --url")
    if dtype not in (None, "float32", "bfloat16"):
        raise SearchError(f"--dtype is float32 or bfloat16, got {dtype!r}")
    fp8_blocks(model)

    def local(data: Calibration) -> TokenEvaluator:
        from sglang_indexcache.lab.search.evaluators.hf import TransformersEvaluator

        return TransformersEvaluator(model, data, dtype or "float32")

    return local


def _resolve(model: Path, patterns: Sequence[str]) -> list[tuple[str, Pattern]]:
    """Return the patterns to compare, with their names."""
    from sglang_indexcache.checkpoint import Checkpoint
    from sglang_indexcache.library.resolve import Library, names_and_patterns

    checkpoint, library = Checkpoint.read(model), Library.default()
    named = names_and_patterns(patterns)
    return [(name, library.resolve(value, checkpoint).pattern) for name, value in named]


def _tell(line: str) -> None:
    out.print(f"[yellow]servers[/yellow]  {escape(line)}", highlight=False)


def _length(context: str | None) -> int | None:
    return None if context is None else parse_length(context)


def _score(text: str | None) -> Score | None:
    from sglang_indexcache.lab.search.calibration import Score

    return None if text is None else Score.parse(text)
