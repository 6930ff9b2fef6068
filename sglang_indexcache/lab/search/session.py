"""One search as a user runs it: with a journal, a progress bar and a folder of results."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from sglang_indexcache.lab.runs.progress import (
    print_plan,
    progress_at_most,
    resumable,
    resuming,
)
from sglang_indexcache.lab.search.difference import unseen_in_words
from sglang_indexcache.lab.search.evaluators import Evaluator
from sglang_indexcache.lab.search.judged import SMALL_LOSS
from sglang_indexcache.lab.search.ledger import Ledger, Step, open_journal
from sglang_indexcache.lab.search.methods import Method
from sglang_indexcache.lab.search.methods.greedy import evaluations
from sglang_indexcache.lab.search.output import OutputFolder
from sglang_indexcache.lab.search.rules import Targets
from sglang_indexcache.lab.search.run import PROBES, Found, Search, check_tokens
from sglang_indexcache.lab.search.setup import Setup
from sglang_indexcache.library.lengths import counted

JOURNAL = "journal.jsonl"


def run_search(
    setup: Setup,
    evaluator: Evaluator,
    targets: Targets,
    method: Method,
    output: Path,
    console: Console | None = None,
    figures: str = "png",
) -> Search:
    """Search, or continue an interrupted search in the same folder.

    ``figures`` is the format of the figure: "png", "pdf" or "svg".

    Raises:
        KeyboardInterrupt: by Ctrl-C or SIGTERM; what was measured so far is in ``output``.
        SearchError: the folder's journal belongs to another search, or an evaluation failed.
    """
    console, identity = console or Console(), setup.identity(evaluator)
    with (
        resumable(console, output, "what was measured"),
        open_journal(output / JOURNAL, identity) as journal,
    ):
        calibration = setup.calibration
        ledger = Ledger(evaluator, journal, calibration.held_out, documents=calibration.documents)
        search = Search(ledger, targets, method)
        folder = OutputFolder(output, search, setup, identity, figures)
        print_plan(console, plan(setup, targets, method))
        resuming(console, len(journal.entries), "evaluations", journal.path)
        try:
            with progress_at_most(console) as progress:
                task = progress.add_task(
                    "running patterns" if method.objective else "comparing layers",
                    total=search.expected_tokens,
                    completed=ledger.known_tokens,
                )
                ledger.on_measured = partial(progress.advance, task)
                for event in search.run():
                    if isinstance(event, Step) and event.layer is not None:
                        _show(event, search, console)
                    shared = len(event.pattern.shared_layers)
                    progress.update(task, description=f"{shared} layers shared")
                    folder.update(event)
                    if isinstance(event, Found) and not event.is_compared:
                        pattern_line = f"{event.mark.label}: {event.pattern}"
                        console.print(
                            f"{pattern_line}, in {folder.path_of(event)}", highlight=False
                        )
        except KeyboardInterrupt:
            folder.finish()
            raise
    folder.finish()
    _show_result(search, setup.objective, console)
    console.print(f"everything is in {output}")
    return search


def plan(setup: Setup, targets: Targets, method: Method) -> Iterator[tuple[str, str]]:
    """Yield what a search will do and how many tokens it forwards at most: names and sentences."""
    tokens = setup.calibration.batch_tokens
    cut = len(tokens) - setup.calibration.held_out
    searched, held_out = tokens[:cut], tokens[cut:]
    least, full = method.least(targets, searched), sum(searched)
    share = 100 * least / (evaluations(targets) * full)
    yield from setup.rows
    yield "method", method.in_words
    yield "targets", ", ".join(mark.label for mark in targets.marks)
    checks = check_tokens(targets, held_out)
    yield (
        "budget",
        f"{least:,} tokens, {share:.1f} % of exhaustive greedy's, which are "
        f"{least / full:.1f} patterns on all {full:,} tokens; then {checks:,} at most to compare "
        f"what was found on {counted(len(held_out), 'held-out sequence')}",
    )
    between = f", and those of up to {PROBES} retentions between targets" * method.judges
    yield "cost", f"{least + checks:,} tokens at most{between}"
    if method.judges and share >= 100:
        yield "advice", "with so few layers Algorithm 1 may cost less: --method greedy"
    if setup.calibration.held_out_warning:
        yield "held out", setup.calibration.held_out_warning


def _show(event: Step, search: Search, console: Console) -> None:
    """Print a flip."""
    added = 100 * (event.loss / search.start_loss - 1)
    full = len(event.pattern.full_layers)
    console.print(
        f"{full:>4} F  layer {event.layer:>3} -> S  loss {event.loss:.5f} ({added:+.3f} %)",
        highlight=False,
    )


def _show_result(search: Search, objective: str, console: Console) -> None:
    names = ("retention", "F", "recall, points", "loss, nats", "KL", "kept", "pattern")
    table = Table(*names, box=SIMPLE)
    table.columns[-1].overflow = "fold"
    for result in search.found.values():
        table.add_row(
            result.mark.label,
            str(len(result.pattern.full_layers)),
            *_cells(result),
            str(result.pattern),
        )
    console.print(table)
    for line in _remarks(search, objective):
        console.print(line, highlight=False, soft_wrap=True)


def _cells(result: Found) -> tuple[str, str, str, str]:
    """Return a row's numbers, blank if nothing was run."""
    measured = result.faithfulness
    if measured is None:
        added = "" if math.isnan(result.loss) else f"{result.loss:.5f} in all"
        return "", added, "", ""
    kl = " ".join(f"{value:.3f}" for value in measured.kl.values())
    likeliest = " ".join(f"{share:.1%}" for share in measured.kept.values())
    return f"{100 * measured.recall.mean:+.1f}", f"{measured.loss.mean:+.5f}", kl, likeliest


def _remarks(search: Search, objective: str) -> Iterator[str]:
    yield from _in_words(search, objective)
    yield from _layers(search)
    if search.method.judges or any(f.held_out for f in search.found.values()):
        yield _safe_in_words(search)
    else:
        yield (
            "nothing was run beside all F: compare the patterns with it (indexcache search compare "
            "full PATTERN) before you serve one"
        )
    share = search.search_tokens / search.exhaustive
    yield (
        f"tokens forwarded: {search.search_tokens:,} ({100 * share:.1f} % of exhaustive greedy's)"
    )


def _in_words(search: Search, objective: str) -> Iterator[str]:
    """Yield text on each pattern's numbers, and on the data behind them."""
    held_out = 0
    for result in search.found.values():
        if measured := result.held_out:
            held_out = len(measured.loss.each)
            yield f"{result.mark.label} on {held_out} held-out documents: {measured.in_words()}"
        elif measured := result.judged:
            documents = f"{len(measured.loss.each)} documents that chose it"
            yield f"{result.mark.label} on the {documents}: {measured.in_words()}"
    if held_out:
        yield (
            f"counted: {objective}; held-out documents chose no pattern, so judge by them; "
            f"{unseen_in_words(held_out)}"
        )
    elif search.method.judges:
        yield (
            f"counted: {objective}; these documents chose the patterns and flatter them a little: "
            "compare them on others (indexcache search compare full PATTERN)"
        )


def _layers(search: Search) -> Iterator[str]:
    """Yield text on how sure the search is of each layer."""
    for result in search.found.values():
        if result.layers:
            sure = [str(n) for n, layer in result.layers.items() if layer.is_sure]
            likely = [str(n) for n, x in result.layers.items() if not x.is_sure and x.share > 1 / 2]
            listed = {*sure, *likely}
            open_layers = [str(n) for n in result.layers if str(n) not in listed]
            words = {"sure of": sure, "likely": likely, "open": open_layers}
            yield f"{result.mark.label} layers: " + "; ".join(
                f"{word} {' '.join(layers)}" for word, layers in words.items() if layers
            )


def _safe_in_words(search: Search) -> str:
    """Return text on the retention that keeps recall, and on targets that do not."""
    if not any(result.faithfulness for result in search.found.values()):
        return "whether a pattern keeps recall is not known: that takes two documents at least"
    limit, safe = f"{100 * SMALL_LOSS:g} points", search.safe
    losing = [
        f"{result.mark.label} ({100 * result.faithfulness.recall.mean:+.1f})"
        for result in search.found.values()
        if result.faithfulness and not result.faithfulness.loses_little
    ]
    verb = "lose" if len(losing) > 1 else "loses"
    loses = f"{' and '.join(losing)} {verb} {limit} of recall or more" if losing else ""
    if safe is None:
        return f"{loses}: no pattern that was found keeps recall on this data"
    keeps = f"the fewest F layers that lose less than {limit} of recall here: {safe.mark.label}"
    if safe.faithfulness and not safe.faithfulness.is_shown_to_lose_little:
        recall = safe.faithfulness.recall
        interval = f"{100 * recall.low:+.1f} to {100 * recall.high:+.1f}"
        keeps += f", as far as {len(recall.each)} documents tell ({interval}): give more"
    return f"{loses}; {keeps}" if loses else keeps
