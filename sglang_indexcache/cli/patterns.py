"""``indexcache patterns``: list and show the patterns of the library."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.box import SIMPLE
from rich.table import Table
from typer import Argument, Option

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.cli.common import Command, group, out
from sglang_indexcache.errors import Findings
from sglang_indexcache.library.digest import checkpoint_digest

if TYPE_CHECKING:
    from sglang_indexcache.library.files import Entry
    from sglang_indexcache.library.resolve import Resolved

app = group("The pattern library.")

# fmt: off
FittedModel = Annotated[Path | None, Option("--model", "--model-path", metavar="FOLDER", help=
    "Only patterns that fit this checkpoint's config.json.")]
Patterns = Annotated[list[str], Argument(metavar="PATTERN", help=
    "Patterns in any form: an F/S string, a name from the library, a YAML file.")]
RatioModel = Annotated[Path | None, Option("--model", "--model-path", metavar="FOLDER", help=
    "The checkpoint that full, uniform:1/4 and ratios are for.")]
# fmt: on


@app.command("list", cls=Command, epilog="Example: indexcache patterns list --model MODEL")
def list_patterns(model: FittedModel = None) -> None:
    """List the library's patterns, and say of each file that is left out why.

    If there is one, the exit code is 1.
    """
    from sglang_indexcache.library.resolve import Library

    library = Library.default()
    entries = list(library.entries.values())
    if model is not None:
        entries = library.for_checkpoint(Checkpoint.read(model))
    table = Table("name", "model", "kept", "found by", box=SIMPLE, padding=(0, 1, 0, 0))
    for column in table.columns:
        column.no_wrap = True
    for entry in entries:
        table.add_row(
            entry.name,
            entry.model.name,
            f"{entry.full_layers} of {entry.model.num_layers} ({entry.retention})",
            re.split(r"[,(]", entry.method.name)[0].strip(),  # `show` prints the whole text
        )
    out.print(table if entries else "no pattern in the library fits this checkpoint")
    problems = Findings()
    problems.each += library.left_out
    problems.report()


@app.command(
    "show", cls=Command, epilog="Example: indexcache patterns show glm-5-1of4 my-pattern.yaml"
)
def show_patterns(patterns: Patterns, model: RatioModel = None) -> None:
    """Show which layer serves which, and where a pattern comes from and how good it is.

    It checks pattern files as well: each problem is told, and the exit code is then 1.
    """
    from sglang_indexcache.library.resolve import Library
    from sglang_indexcache.serving.operating.drawing import to_terminal

    checkpoint = None if model is None else Checkpoint.read(model)
    library = Library.default()
    resolutions: dict[str, Resolved] = {}
    problems = Findings()
    for value in patterns:
        with problems:
            resolutions[value] = library.resolve(value, checkpoint)
    for value, resolved in resolutions.items():
        entry = resolved.entry
        title = f"{entry.name}: {entry.model.name}" if entry else value
        out.print(to_terminal(resolved.pattern, title))
        if entry:
            _show_provenance(entry)
            if model is not None:
                out.print(f"here       {entry.known(partial(checkpoint_digest, model))}")
    problems.report()


def _show_provenance(entry: Entry) -> None:
    out.print(f"\n{entry.pattern}\n", soft_wrap=True, highlight=False)
    by_loss = f", minimising {entry.method.objective}" if entry.method.objective else ""
    out.print(f"found by   {entry.method.name}{by_loss}")
    out.print(f"data       {entry.method.data}")
    where = f"{entry.source.where} ({entry.source.url})" if entry.source.url else entry.source.where
    out.print(f"source     {entry.source.title}, {where}")
    if entry.model.note:
        out.print(f"note       {entry.model.note.strip()}")
    if entry.scores:
        table = Table("benchmark", "this pattern", "all F", "uniform", "source", title="quality")
        for row in entry.scores:
            scores = (row.score, row.all_full, row.uniform)
            cells = ["" if score is None else f"{score:g}" for score in scores]
            table.add_row(row.benchmark, *cells, row.where)
        out.print(table)
    if entry.evaluated:
        table = Table(
            "verdict", "contexts", "pairs", "checkpoint", "commit", "date", title="evaluated"
        )
        for evaluation in entry.evaluated:
            counts = (f"{evaluation.contexts:,}", f"{evaluation.pairs:,}")
            source = (evaluation.checkpoint[:12], evaluation.commit, evaluation.date)
            table.add_row(str(evaluation), *counts, *source)
        out.print(table)
    if entry.latency:
        table = Table("metric", "context", "this pattern", "all F", "source", title="latency")
        for speed in entry.latency:
            speeds = (speed.value, speed.all_full)
            cells = ["" if value is None else f"{value:g} {speed.unit}" for value in speeds]
            table.add_row(speed.metric, speed.context, *cells, speed.where)
        out.print(table)
