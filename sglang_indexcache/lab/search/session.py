"""One search as a user runs it: with a journal, a progress bar and a folder of results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from sglang_indexcache.lab.runs.cost import Cost, Rate, print_plan
from sglang_indexcache.lab.runs.progress import progress_at_most, resumable, resuming
from sglang_indexcache.lab.search.difference import unseen_in_words
from sglang_indexcache.lab.search.evaluators import Evaluator
from sglang_indexcache.lab.search.ledger import Ledger, Step, open_journal
from sglang_indexcache.lab.search.methods import Walks
from sglang_indexcache.lab.search.methods.pairwise import Pairwise
from sglang_indexcache.lab.search.options import Options
from sglang_indexcache.lab.search.output import OutputFolder
from sglang_indexcache.lab.search.rules import Targets
from sglang_indexcache.lab.search.run import Found, Search, check_tokens
from sglang_indexcache.lab.search.setup import Setup

JOURNAL = "journal.jsonl"
BLIND = (
    "do not tell which heads need them: on a real model their patterns kept recall at 1/2 and 1/4, "
    "and at 1/8 lost 12 points that those by attention, without --url, kept"
)
"""The warning beside a search by lists: what it is known to miss (docs/real-model.md)."""
NEAR_EXHAUSTIVE = 0.5
"""Share of exhaustive greedy's tokens from which it is worth telling of that one instead."""


def run_search(
    setup: Setup,
    evaluator: Evaluator,
    targets: Targets,
    options: Options,
    output: Path,
    console: Console | None = None,
    rate: Rate | None = None,
    figures: str = "png",
) -> Search:
    """Search, or go on where an interrupted search of the same folder was.

    ``figures`` is the format of its figure: "png", "pdf" or "svg".

    Raises:
        KeyboardInterrupt: by Ctrl-C or SIGTERM; what was found until then is in ``output``.
        SearchError: the folder's journal is another search's, or an evaluation failed.
    """
    console, identity = console or Console(), setup.identity(evaluator)
    with (
        resumable(console, output, "what was found"),
        open_journal(output / JOURNAL, identity) as journal,
    ):
        ledger = Ledger(evaluator, journal, setup.calibration.held_out)
        search = Search(ledger, targets, options)
        folder = OutputFolder(output, search, setup, identity, figures)
        print_plan(console, plan(setup, targets, options, rate))
        walk = ""
        resuming(console, len(journal.entries), "evaluations", journal.path)
        try:
            with progress_at_most(console) as progress:
                task = progress.add_task(
                    "measuring the start" if options.method.by_loss else "comparing layers",
                    total=search.expected_tokens,
                    completed=ledger.known_tokens,
                )
                ledger.on_measured = partial(progress.advance, task)
                for event in search.run():
                    if isinstance(event, Step) and event.layer is not None:
                        walk = _show(event, search, console, walk)
                    shared = len(event.pattern.shared_layers)
                    progress.update(task, description=f"{shared} layers shared")
                    folder.update(event)
                    if isinstance(event, Found) and event.is_final and not event.is_compared:
                        found = f"{event.mark.label}: {event.pattern}"
                        console.print(f"{found}, in {folder.path_of(event)}", highlight=False)
        except KeyboardInterrupt:
            folder.finish()
            raise
    folder.finish()
    _show_result(search, setup.objective, console)
    console.print(f"everything is in {output}")
    return search


def plan(
    setup: Setup, targets: Targets, options: Options, rate: Rate | None
) -> Iterator[tuple[str, str]]:
    """Yield what a search will do and forward at most: a name and a sentence each.

    Raises:
        SearchError: a budget that it cannot keep; see :meth:`Options.budget`.
    """
    tokens = setup.calibration.batch_tokens
    cut = len(tokens) - setup.calibration.held_out
    searched, held_out = tokens[:cut], tokens[cut:]
    budget = options.budget(targets, searched)
    yield from setup.rows
    yield "method", options.in_words()
    if isinstance(options.method, Walks) and (start := options.method.start):
        tokens_of_start = start.least(targets, searched)
        yield "start", f"{start.in_words}: {tokens_of_start:,} tokens of the budget"
    if isinstance(options.method, Pairwise) and options.method.kind == "kept_list":
        yield "lists", BLIND
    yield "targets", ", ".join(mark.label for mark in targets.marks)
    by_loss, full = options.method.by_loss, sum(searched)
    checks = check_tokens(targets, searched, held_out, by_loss=by_loss)
    yield (
        "budget",
        f"{budget.total:,} tokens, {100 * budget.share:.1f} % of exhaustive greedy's, which are "
        f"{budget.total / full:.1f} patterns on all {full:,} tokens; then "
        f"{checks:,} at most to compare what was found",
    )
    yield "cost", Cost(budget.total + checks, rate).in_words()


def _walk(step: Step) -> str:
    """Return the walk that a flip belongs to; "" for the start."""
    if step.layer is None:
        return ""
    return "way up" if step.pattern.is_full(step.layer) else "way down"


def _show(event: Step, search: Search, console: Console, before: str) -> str:
    """Print a flip, and first the walk if it begins; the walk before was ``before``."""
    walk = _walk(event)
    kind = "F" if walk == "way up" else "S"
    if walk != before:
        console.print(f"{walk}: each flip makes one more layer {kind}", highlight=False)
    added = 100 * (event.loss / search.start_loss - 1)
    sure = "" if event.decided else ", undecided"
    full = len(event.pattern.full_layers)
    console.print(
        f"{full:>4} F  layer {event.layer:>3} -> {kind}  loss {event.loss:.5f} "
        f"({added:+.3f} %, {event.batches} batches{sure})",
        highlight=False,
    )
    return walk


def _losses(result: Found, search: Search) -> tuple[str, str]:
    if math.isnan(result.loss):
        return "", ""
    return f"{result.loss:.5f}", f"{100 * (result.loss / search.start_loss - 1):+.3f} %"


def _show_result(search: Search, objective: str, console: Console) -> None:
    names = ("retention", "F", "loss", "over start", "held out", "uniform", "pattern")
    table = Table(*names, box=SIMPLE)
    table.columns[-1].overflow = "fold"
    for result in search.found.values():
        uniform, held_out = result.baselines.get("uniform"), result.held_out
        table.add_row(
            result.mark.label,
            str(len(result.pattern.full_layers)),
            *_losses(result, search),
            f"{held_out.added.mean:+.5f}" if held_out else "not measured",
            f"{uniform[1]:.5f}" if uniform else "",
            str(result.pattern),
        )
    console.print(table)
    for line in _remarks(search, objective):
        console.print(line, highlight=False)


def _held_out(search: Search) -> Iterator[str]:
    """Tell what to judge the patterns by: what they add on held-out documents."""
    added = {f.mark.label: f.held_out.added for f in search.found.values() if f.held_out}
    for mark, difference in added.items():
        interval = f"95 % interval {difference.low:+.5f} to {difference.high:+.5f}"
        yield f"{mark} held out: {interval}; {difference.documents}"
    if added:
        documents = len(next(iter(added.values())).each)
        yield (
            "held out: what a pattern adds on documents that the search did not choose it by. "
            f"Judge it by that: the loss it was chosen by flatters it; {unseen_in_words(documents)}"
        )


def _remarks(search: Search, objective: str) -> Iterator[str]:
    if search.is_measured:
        yield f"every loss is that of {objective}, in nats per token"
    yield from _held_out(search)
    flips = Counter(map(_walk, search.path))
    share = search.search_tokens / search.budget.exhaustive
    if undecided := Counter(_walk(step) for step in search.path if not step.decided):
        counts = " and ".join(f"{n} of {flips[w]} flips on the {w}" for w, n in undecided.items())
        yield (
            f"{counts} are undecided: the budget ended while several candidates were left, which "
            "these batches could not tell apart. More of them (--batches), or more budget "
            "(--budget), would tell. Decided is no proof either: each comparison has 95 % for "
            "itself alone."
        )
        if share > NEAR_EXHAUSTIVE:
            yield (
                "with so few layers --method greedy, which measures every candidate on every "
                f"batch and decides each flip, takes {1 / share:.1f} times the tokens"
            )
    if not search.is_measured:
        yield (
            "no loss decided and none was measured: compare the patterns with all F (indexcache "
            "search compare full PATTERN) before you serve one"
        )
    base = f"loss with every indexer: {search.start_loss:.5f} nats per token; "
    yield (
        f"{base if search.path else ''}tokens forwarded: {search.search_tokens:,} "
        f"({100 * share:.1f} % of exhaustive greedy's)"
    )
