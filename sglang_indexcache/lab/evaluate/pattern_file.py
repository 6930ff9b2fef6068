"""An evaluation's verdict in the file of the pattern that it judges."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError

from sglang_indexcache.errors import LibraryError, QualityError
from sglang_indexcache.lab.evaluate.evaluation import Evaluation
from sglang_indexcache.lab.evaluate.verdict import Look, Verdict, verdicts_of
from sglang_indexcache.library.files import Entry, Evaluated, load_entry
from sglang_indexcache.library.writing import write_whole
from sglang_indexcache.pattern import Pattern


def write_quality(path: Path, evaluation: Evaluation) -> str:
    """Write the verdict on a pattern into its file's ``quality`` section, and return the verdict.

    Raises:
        QualityError: the evaluation does not have this pattern, or nothing was decided yet.
        LibraryError: the file is no pattern file.
    """
    entry = load_entry(path)
    matching = [arm for arm in evaluation.candidates if Pattern(arm.pattern) == entry.parsed]
    if not matching:
        names = ", ".join(arm.name for arm in evaluation.candidates)
        raise QualityError(f"{path} has another pattern than those evaluated ({names})")
    verdict = verdicts_of(evaluation).get(matching[0].name)
    if verdict is None:
        raise QualityError("the first look has not been reached; let the evaluation go on")
    row = evaluated(evaluation, *verdict)
    add_evaluated(path, row)
    return str(row)


def evaluated(evaluation: Evaluation, look: int, verdict: Verdict) -> Evaluated:
    """Return the record of a verdict at a look, for the lengths and tasks of the claim."""
    rows = Look(evaluation, look).long
    all_cells = {row.cell for row in rows}
    cells = all_cells - set(verdict.blind) or all_cells
    contexts = {row.context for row in rows if row.cell in cells}
    return Evaluated(
        verdict=cast(Any, verdict.kind.name.lower().replace("_", " ")),
        margin=evaluation.design.margin,
        difference=verdict.difference,
        interval=verdict.interval,
        contexts=len(contexts),
        pairs=verdict.flips.pairs if verdict.flips else 0,
        tasks=tuple(sorted({task for task, _ in cells})),
        lengths=tuple(sorted({length for _, length in cells})),
        blind=tuple(f"{task} at {length}" for task, length in sorted(all_cells - cells)),
        checkpoint=str(evaluation.facts["checkpoint"]),
        commit=str(evaluation.facts.get("commit", "")),
        date=str(evaluation.facts.get("started", ""))[:10],
    )


def add_evaluated(path: Path, row: Evaluated) -> None:
    """Write a verdict into a pattern file, and leave the rest of its text unchanged.

    Raises:
        LibraryError: the file is no pattern file, or its layout has no place for a verdict.
    """
    before = load_entry(path)
    data = row.model_dump(mode="json", exclude_defaults=True)
    flow = yaml.safe_dump(data, default_flow_style=True, sort_keys=False, width=10**6).strip()
    text = path.read_text(encoding="utf-8")
    listed = re.search(r"^quality:[^\n\[]*\n(?:[ ]*#[^\n]*\n)*([ ]*)- ", text, re.MULTILINE)
    if listed:
        # Insert after the list: at the first line that is no item, no comment and not indented
        # deeper.
        beyond = re.compile(rf"^(?!{listed[1]}(?:-|[ ])|[ ]*#)", re.MULTILINE)
        end = beyond.search(text, listed.end())
        place = end.start() if end else len(text)
        head = text[:place] if text[:place].endswith("\n") else f"{text[:place]}\n"
        text = f"{head}{listed[1]}- {flow}\n{text[place:]}"
    else:
        text = f"{text.rstrip()}\nquality:\n- {flow}\n"
    _rewrite(path, text, before.model_copy(update={"quality": (*before.quality, row)}))


def _rewrite(path: Path, text: str, expected: Entry) -> None:
    """Write ``text`` after checking that it parses to exactly the expected entry."""
    try:
        is_right = Entry.model_validate(yaml.safe_load(text)) == expected
    except (yaml.YAMLError, ValidationError):
        is_right = False
    if not is_right:
        raise LibraryError(
            f"{path} has no place for a verdict; write its lists one item a line, and its "
            "sections one below the other"
        )
    write_whole(path, text)
