"""Material for a plan's contexts, from which each context is made, the same on every call.

From a user's files, the rows are asked that fit the lengths and could show a difference.
"""

from __future__ import annotations

import hashlib
import random
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from sglang_indexcache.errors import QualityError
from sglang_indexcache.lab.data.words import haystack
from sglang_indexcache.lab.evaluate.evaluation_plan import (
    CONTROL_LOOK,
    EvaluationPlan,
    Planned,
    SelectedRows,
)
from sglang_indexcache.lab.evaluate.tasks import TASKS
from sglang_indexcache.lab.evaluate.tasks.context import (
    Context,
    Question,
    Tokenizer,
    has_template,
    make_context,
)
from sglang_indexcache.lab.evaluate.tasks.files import (
    BESIDE,
    FILES,
    Item,
    pieces,
    read_items,
    tokenized,
)
from sglang_indexcache.lab.runs.progress import progress_at_most
from sglang_indexcache.library.lengths import counted

SKIP, MOST_SKIPPED = 1_000_000, 4
"""Step by which an unusable seed is raised, and the largest number of such steps."""


@dataclass(frozen=True)
class Corpus:
    """Corpus from which contexts are made: tokenizer, rows of files, tasks.

    Attributes:
        questions: number of questions after one generated context.
        items: rows by task, by the first row number of their text, and by their own number.
    """

    tokenizer: Tokenizer
    questions: int
    items: Mapping[str, Mapping[int, Mapping[int, Item]]] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Digest of all material for contexts except the tasks."""
        pieces = sorted(self.tokenizer.get_vocab().items())
        template = getattr(self.tokenizer, "chat_template", None)
        items = {task: dict(items) for task, items in self.items.items()}
        parts = (pieces, template, haystack(), items)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def make(self, planned: Planned) -> Context:
        """Make a planned context, or raise a QualityError if its task cannot fit the length."""
        return self._make_with_reason(planned)[0]

    def check(self, planned: Sequence[Planned], console: Console) -> None:
        """Make every context once, so that no impossible one turns up in the middle of a run.

        It prints which contexts had to be made from another seed.
        """
        with progress_at_most(console) as progress:
            for context in progress.track(planned, description="making every context"):
                if reason := self._make_with_reason(context)[1]:
                    line = f"{context.context} is made from {reason}"
                    console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _make_with_reason(self, planned: Planned) -> tuple[Context, str]:
        """Return a context, and the reason if another seed had to be used ("" if not)."""
        seed = int(planned.context.rpartition("-")[2])
        if planned.task in self.items:
            return self._row(planned, seed), ""
        if planned.look == CONTROL_LOOK:
            return self._control(planned, seed), ""
        why = ""
        for used in range(seed, seed + MOST_SKIPPED * SKIP + 1, SKIP):
            try:
                context = self._generated(planned, used, self.questions)
            except QualityError as error:
                why = why or str(error)
            else:
                return context, why and f"seed {used} instead: {why}"
        raise QualityError(f"{planned.task}: {why}. Ask longer contexts (--length).")

    def _row(self, planned: Planned, number: int) -> Context:
        prompt_and_questions = _together(self.items[planned.task][number], self.tokenizer)
        return Context(planned.context, planned.task, planned.length, *prompt_and_questions)

    def _control(self, planned: Planned, seed: int) -> Context:
        """Make a context for the control, which is so short that fewer questions may fit."""
        questions = self.questions
        while questions:
            try:
                return self._generated(planned, seed, questions)
            except QualityError:
                questions //= 2
        raise QualityError(
            f"not even one question fits the {planned.length} tokens of a control. An evaluation "
            "begins with contexts in which all patterns must agree, and this model's index_topk "
            "leaves no room for one."
        )

    def _generated(self, planned: Planned, seed: int, questions: int) -> Context:
        task, length = planned.task, planned.length
        context = make_context(task, TASKS[task], self.tokenizer, length, seed, questions)
        return replace(context, name=planned.context)


_CHARACTERS = 16
"""Largest average of characters per token: a text beyond it is too long without counting tokens."""
_FEWEST = 2
"""Smallest number of items in a cell: with fewer its spread is not known."""


def select_rows(
    plan: EvaluationPlan,
    files: Mapping[str, Path],
    tokenizer: Tokenizer,
    longest: int,
) -> tuple[EvaluationPlan, dict[str, dict[int, dict[int, Item]]], tuple[str, ...]]:
    """Read files and choose rows; the model takes contexts of up to ``longest`` tokens.

    Returns:
        The plan with the chosen rows; the rows' items by task, text and number; and a sentence for
        each file on the rows left out and why.

    Raises:
        QualityError: a file cannot be read, or has no row that could be asked.
    """
    selected: list[SelectedRows] = []
    items: dict[str, dict[int, dict[int, Item]]] = {}
    remarks = []
    for name, path in files.items():
        cells, items[name], summary = _choose(name, path, tokenizer, plan, longest)
        selected += cells
        remarks += [summary, BESIDE[name]] if name in BESIDE else [summary]
    if files and not has_template(tokenizer):
        remarks.append(
            "The tokenizer has no chat template: conversations are sent as plain turns, User: and "
            "Assistant:."
        )
    return replace(plan, taken=tuple(selected)), items, tuple(remarks)


def _choose(
    name: str,
    path: Path,
    tokenizer: Tokenizer,
    plan: EvaluationPlan,
    longest: int,
) -> tuple[list[SelectedRows], dict[int, dict[int, Item]], str]:
    """Choose rows from one file.

    Returns:
        Its rows by length; their items by text and number; and a sentence on the rows left out.
    """
    left_out: dict[str, int] = defaultdict(int)
    items, rows = _askable(name, path, tokenizer, plan, longest, left_out)
    sizes = {number: _size(item) for number, item in items.items()}
    selected: list[SelectedRows] = []
    items_asked: dict[int, dict[int, Item]] = {}
    for length, texts in sorted(_cells(items, sizes, plan, left_out).items()):
        if len(texts) < max(plan.looks, _FEWEST):
            left_out[
                f"at {length:,} tokens, too few for {counted(plan.looks, 'look')} (take fewer "
                "--length, or fewer --looks)"
            ] += sum(map(len, texts.values()))
            continue
        order = random.Random(f"{name} {length} {plan.seed}").sample(list(texts), len(texts))
        groups = {lead: {row: items[row] for row in texts[lead]} for lead in order[: plan.contexts]}
        items_asked |= groups
        selected.append(
            SelectedRows(
                *(name, length, tuple(groups)),
                tuple(_computed(group, sizes, tokenizer) for group in groups.values()),
                len(texts),
                tuple(map(len, groups.values())),
                max(sizes[row] for group in groups.values() for row in group),
            )
        )
    summary = _summary(name, rows, selected, left_out, plan)
    if overlapping := _overlapping(items_asked):
        summary += (
            f" {counted(overlapping, 'text')} share a tenth to a half with another, as cuts of one "
            "document do that overlap: they fail together, and count as independent. Cut apart."
        )
    if not selected:
        raise QualityError(f"{path} has nothing that can be asked. {summary}")
    return selected, items_asked, summary


def _askable(
    name: str,
    path: Path,
    tokenizer: Tokenizer,
    plan: EvaluationPlan,
    longest: int,
    left_out: dict[str, int],
) -> tuple[dict[int, Item], int]:
    """Return a file's items that can be asked, by row, and the file's number of rows.

    ``left_out`` counts the other rows by reason; this adds to it.
    """
    items: dict[int, Item] = {}
    most, rows = min(longest, plan.lengths[-1]), 0
    too_long = f"longer than {most:,} tokens (the longest --length, or the model's context)"
    too_short = f"of at most {plan.selects_all:,} tokens (index_topk), where no pattern matters"
    for row, item in read_items(FILES[name], path):
        rows += 1
        if len(item.text) > _CHARACTERS * most:
            left_out[too_long] += 1
            continue
        try:
            item = tokenized(item, tokenizer)
        except QualityError as error:
            raise QualityError(f"{row.where}: {error}") from error
        if plan.selects_all < _size(item) <= most:
            items[row.number] = item
        else:
            left_out[too_long if _size(item) > most else too_short] += 1
    return items, rows


_WINDOW, _SAMPLED, _ENOUGH = 16, 16, 32
"""Number of words in a window, share of words (one in this many) that begin a compared window, and
number of windows that identify a text: repetitive filler has fewer."""
CUT_SHARE = 0.1
"""Share of a text's windows in another text from which the two count as overlapping."""
_WORD = re.compile(r"[\u3040-\u9fff\uac00-\ud7af]|[^\s\u3040-\u9fff\uac00-\ud7af]+")
"""A word, or a character of a language that does not separate words."""


def _cells(
    items: Mapping[int, Item],
    sizes: Mapping[int, int],
    plan: EvaluationPlan,
    left_out: dict[str, int],
) -> dict[int, dict[int, list[int]]]:
    """Return rows by length and by first row, with one place for each text; count rows left out.

    Args:
        sizes: number of tokens of each row.
        left_out: counts of rows by the reason why they are not asked; this adds to it.
    """
    cells: dict[int, dict[int, list[int]]] = defaultdict(dict)
    for text in _texts(items):
        parts: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, beginning in text.items():
            length = next(limit for limit in plan.lengths if sizes[number] <= limit)
            parts[length, beginning].append(number)
        # Shuffled first, so that chance and not the length decides among parts of equal size.
        places = random.Random(f"{min(text)} {plan.seed}").sample(sorted(parts), len(parts))
        place = max(places, key=lambda group: len(parts[group]))
        cells[place[0]][min(parts[place])] = parts[place]
        if other_rows := len(text) - len(parts[place]):
            left_out["about the text of another row (one text, one observation)"] += other_rows
    return cells


def _texts(items: Mapping[int, Item]) -> list[dict[int, int]]:
    """Group rows by their text; each row maps to the first row with the same beginning.

    Questions about one document, or turns of one conversation, fail together, and must not count as
    independent. Two rows are about one text if they agree in the first half of the shorter one, or
    if half of its windows of :data:`_WINDOW` words occur anywhere in the other.
    """
    groups = _begun_alike(items)
    windows = {
        first: {window for row in rows for window in _windows(items[row].text)}
        for first, rows in groups.items()
    }
    owners: dict[int, int] = {}
    texts: dict[int, dict[int, int]] = {}
    for first in sorted(groups, key=lambda row: (-len(windows[row]), row)):
        texts[first] = dict.fromkeys(groups[first], first)
        for owner in _same_text(windows[first], owners):
            texts[first] |= texts.pop(owner)
            owners |= {window: first for window, holder in owners.items() if holder == owner}
        owners |= {window: first for window in windows[first] if window not in owners}
    return [texts[first] for first in sorted(texts, key=lambda row: min(texts[row]))]


def _begun_alike(items: Mapping[int, Item]) -> dict[int, list[int]]:
    """Group sorted rows that share half of their text with the previous row, by the first row."""
    groups: dict[int, list[int]] = {}
    before, first = "", -1
    for text, row in sorted((item.text, row) for row, item in items.items()):
        shared = (min(len(before), len(text)) + 1) // 2
        if first < 0 or before[:shared] != text[:shared]:
            first = row
        groups.setdefault(first, []).append(row)
        before = text
    return groups


def _same_text(windows: set[int], owners: Mapping[int, int]) -> list[int]:
    """Return the texts that hold half of a group's windows; ``owners`` has each window's text."""
    overlaps = Counter(owners[window] for window in windows if window in owners)
    least = max(_ENOUGH, len(windows)) / 2
    return [owner for owner, count in overlaps.items() if count >= least]


def _overlapping(texts: Mapping[int, Mapping[int, Item]]) -> int:
    """Count the texts that share a tenth of their windows with another text, but not half.

    Windows in more than two texts are ignored, because instructions occur in all texts.
    """
    windows = {
        first: {window for item in rows.values() for window in _windows(item.text)}
        for first, rows in texts.items()
    }
    owners = defaultdict[int, list[int]](list)
    for first, of_text in windows.items():
        for window in of_text:
            owners[window].append(first)
    shared = Counter(tuple(pair) for pair in owners.values() if len(pair) == 2)
    overlapping: set[int] = set()
    for pair, count in shared.items():
        if count >= max(_ENOUGH, min(len(windows[first]) for first in pair)) * CUT_SHARE:
            overlapping |= {*pair}
    return len(overlapping)


def _windows(text: str) -> set[int]:
    """Return digests of a sample of windows, chosen by content and not by place."""
    words = _WORD.findall(text)
    begins = {word for word in set(words) if zlib.crc32(word.encode()) % _SAMPLED == 0}
    return {
        zlib.crc32(" ".join(words[place : place + _WINDOW]).encode())
        for place, word in enumerate(words)
        if word in begins
    }


def _computed(rows: Mapping[int, Item], sizes: Mapping[int, int], tokenizer: Tokenizer) -> int:
    """Count the tokens to compute for rows about one text: the common beginning counts once."""
    if len(rows) == 1:
        return sizes[next(iter(rows))]
    ids, questions = _together(rows, tokenizer)
    return len(ids) + sum(len(question.ids) + len(question.answer) for question in questions)


def _together(rows: Mapping[int, Item], tokenizer: Tokenizer) -> tuple[list[int], list[Question]]:
    """Return the rows' common beginning, in tokens, and the remaining questions."""
    parts = {number: pieces(item, tokenizer) for number, item in rows.items()}
    prompts = [prompt for prompt, _ in parts.values()]
    least = min(map(len, prompts))
    differing = (n for n, ids in enumerate(zip(*prompts, strict=False)) if len(set(ids)) > 1)
    shared = least if len(rows) == 1 else next(differing, least)
    questions = []
    for number, (prompt, answer) in parts.items():
        item = rows[number]
        question = Question(f"row{number}", prompt[shared:], answer, "", item.answer, None)
        questions.append(replace(question, by_token=item.by_token))
    return prompts[0][:shared], questions


def _size(item: Item) -> int:
    """Count the tokens of a tokenized item, including its answer."""
    return sum(map(len, item.ids))


def _summary(
    name: str,
    rows: int,
    selected: Sequence[SelectedRows],
    left_out: Mapping[str, int],
    plan: EvaluationPlan,
) -> str:
    parts = [
        f"{len(cell.rows):,} at {cell.length:,} tokens"
        + (
            f" (all that it has, of {plan.contexts:,} asked for)"
            if cell.available < plan.contexts
            else ""
        )
        for cell in selected
    ]
    text_count = sum(len(cell.rows) for cell in selected)
    row_count = sum(sum(cell.questions) for cell in selected)
    sentence = f"{name}: {row_count:,} of {rows:,} rows are asked"
    if text_count < row_count:  # rows about one text
        sentence += f", about {counted(text_count, 'text')}"
    sentence += f": {', '.join(parts)}." if parts else "."
    unasked = sum(cell.available - len(cell.rows) for cell in selected)
    reasons = [f"{count:,} {why}" for why, count in left_out.items()]
    if unasked:
        reasons.append(f"{unasked:,} more than --contexts {plan.contexts:,}")
    return sentence + (f" Left out: {'; '.join(reasons)}." if reasons else "")
