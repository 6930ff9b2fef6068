"""What the contexts of a plan are made of, and each context made of it, the same on every call.

Of a user's files those rows are asked that fit the lengths and could show anything.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.plan import (
    CONTROL_CONTEXTS,
    CONTROL_LOOK,
    EvaluationPlan,
    Planned,
    SelectedRows,
    context_name,
)
from sglang_indexcache.evaluate.tasks import CONTROL, TASKS
from sglang_indexcache.evaluate.tasks.context import (
    Context,
    Question,
    Tokenizer,
    has_template,
    make_context,
)
from sglang_indexcache.evaluate.tasks.files import FILES, Item, pieces, read_items
from sglang_indexcache.evaluate.tasks.words import haystack
from sglang_indexcache.study.journal import progress_at_most
from sglang_indexcache.support.lengths import counted

SKIP, MOST_SKIPPED = 1_000_000, 4
"""A seed from which no context can be made is raised by so much, so many times."""


@dataclass(frozen=True)
class Corpus:
    """The model's tokenizer, questions behind one context, rows of files by task and number."""

    tokenizer: Tokenizer
    questions: int
    items: Mapping[str, Mapping[int, Item]] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Of everything that contexts are made of, but for their tasks."""
        pieces = sorted(self.tokenizer.get_vocab().items())
        template = getattr(self.tokenizer, "chat_template", None)
        items = {task: dict(items) for task, items in self.items.items()}
        made_of = (pieces, template, haystack(), items)
        return hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]

    def make(self, planned: Planned) -> Context:
        """A planned context, or a QualityError if none of its task has this length."""
        return self._made(planned)[0]

    def fit(self, plan: EvaluationPlan) -> EvaluationPlan:
        """Make sure that every task fits, and choose for the control what fits its few tokens.

        Up to ``index_topk`` tokens no pattern matters in any task. So where not even one question
        of a task fits the control, :data:`CONTROL` stands in for it.

        Raises:
            QualityError: names every task that does not fit the plan's shortest contexts, with
                those that do; or says that nothing fits the control.
        """
        asked = [(task, min(plan.lengths), 1, (plan.seed,)) for task in plan.tasks]
        if problems := [problem for one in asked if (problem := self._problem(*one))]:
            fits = [task for task in TASKS if not self._problem(task, *asked[0][1:])]
            other = f", or what fits: --task {' --task '.join(fits)}" if fits else ""
            raise QualityError(f"{'; '.join(problems)}. Ask longer contexts (--length){other}.")
        control = plan.control_length, CONTROL_LOOK, range(CONTROL_CONTEXTS)
        controls = [
            CONTROL if self._problem(task, *control) else task for task in plan.tasks or (CONTROL,)
        ]
        if CONTROL in controls and (problem := self._problem(CONTROL, *control)):
            raise QualityError(
                f"{problem}. An evaluation begins with contexts in which all patterns must agree, "
                f"and this model's index_topk, {plan.selects_all}, leaves no room for one."
            )
        return replace(plan, controls=tuple(dict.fromkeys(controls)))

    def _problem(self, task: str, length: int, look: int, seeds: Iterable[int]) -> str:
        """Why one of these contexts cannot be made; empty if all can."""
        try:
            for seed in seeds:
                self.make(Planned(context_name(task, length, seed), task, length, look, False))
        except QualityError as error:
            return f"{task}: {error}"
        return ""

    def check(self, planned: Sequence[Planned], console: Console) -> None:
        """Make every context once, so that none is found impossible in the middle of a run.

        Tells which had to be made from another seed.
        """
        with progress_at_most(console) as progress:
            for one in progress.track(planned, description="making every context"):
                if said := self._made(one)[1]:
                    line = f"{one.context} is made from {said}"
                    console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _made(self, planned: Planned) -> tuple[Context, str]:
        """A context, and from which other seed it had to be made and why; empty if from its own."""
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
        raise QualityError(why)

    def _row(self, planned: Planned, number: int) -> Context:
        item = self.items[planned.task][number]
        prompt, begun, answer = pieces(item, self.tokenizer)
        question = Question(f"row{number}", begun, answer, item.begun, item.answer, item.depth)
        return Context(planned.context, planned.task, planned.length, prompt, [question])

    def _control(self, planned: Planned, seed: int) -> Context:
        """So short that fewer questions may fit behind it."""
        questions = self.questions
        while questions:
            try:
                return self._generated(planned, seed, questions)
            except QualityError:
                questions //= 2
        raise QualityError(f"not even one question fits the {planned.length} tokens of a control")

    def _generated(self, planned: Planned, seed: int, questions: int) -> Context:
        task, length = planned.task, planned.length
        made = make_context(task, TASKS[task], self.tokenizer, length, seed, questions)
        return replace(made, name=planned.context)


_CHARACTERS = 16
"""Of a token on average, at most: what has more characters is too long without being counted."""
_FEWEST = 2
"""Items of a cell, whose spread is not known with fewer."""


def select_rows(
    plan: EvaluationPlan,
    files: Mapping[str, Path],
    tokenizer: Tokenizer,
    longest: int,
) -> tuple[EvaluationPlan, dict[str, dict[int, Item]], tuple[str, ...]]:
    """Read files and choose from them; the model takes contexts of ``longest`` tokens.

    Returns:
        The plan with the rows, by task and number what they ask, and a sentence for each file on
        what was left out and why.

    Raises:
        QualityError: a file that cannot be read, or nothing in one that could be asked.
    """
    taken: list[SelectedRows] = []
    items: dict[str, dict[int, Item]] = {}
    told = []
    for name, path in files.items():
        cells, items[name], said = _choose(name, path, tokenizer, plan, longest)
        taken += cells
        told.append(said)
    if files and not has_template(tokenizer):
        told.append(
            "The tokenizer has no chat template: conversations are sent as plain turns, User: and "
            "Assistant:."
        )
    return replace(plan, taken=tuple(taken)), items, tuple(told)


def _choose(
    name: str,
    path: Path,
    tokenizer: Tokenizer,
    plan: EvaluationPlan,
    longest: int,
) -> tuple[list[SelectedRows], dict[int, Item], str]:
    cells: dict[int, dict[int, int]] = defaultdict(dict)
    items: dict[int, Item] = {}
    left: dict[str, int] = defaultdict(int)
    most, rows = min(longest, plan.lengths[-1]), 0
    for row, item in read_items(FILES[name], path):
        rows += 1
        try:
            why, size = _why_not(item, tokenizer, plan, most)
        except QualityError as error:
            raise QualityError(f"{row.where}: {error}") from error
        if why:
            left[why] += 1
        else:
            cells[next(one for one in plan.lengths if size <= one)][row.number] = size
            items[row.number] = item
    for number in _repeated(items, plan.seed):
        left[
            "that begin as another row does for half their text (one document, one observation)"
        ] += 1
        for sizes in cells.values():
            sizes.pop(number, None)
    taken = []
    for length, sizes in sorted(cells.items()):
        if len(sizes) < max(plan.looks, _FEWEST):
            left[
                f"at {length:,} tokens, too few for {counted(plan.looks, 'look')} (take fewer "
                "--length, or fewer --looks)"
            ] += len(sizes)
            continue
        order = random.Random(f"{name} {length} {plan.seed}").sample(list(sizes), len(sizes))
        chosen = tuple(order[: plan.contexts])
        known = tuple(sizes[row] for row in chosen)
        taken.append(SelectedRows(name, length, chosen, known, len(sizes)))
    said = _told(name, rows, taken, left, plan)
    if not taken:
        raise QualityError(f"{path} has nothing that can be asked. {said}")
    return taken, {row: items[row] for cell in taken for row in cell.rows}, said


def _repeated(items: Mapping[int, Item], seed: int) -> list[int]:
    """All rows but one of those that begin with the same text for half of the shorter one.

    Questions about one document, or turns of one conversation, fail together, and would count as
    independent. Which one is asked follows from the seed.
    """
    documents: list[list[int]] = []
    before = ""
    for text, row in sorted((item.text, row) for row, item in items.items()):
        shared = (min(len(before), len(text)) + 1) // 2
        if documents and before[:shared] == text[:shared]:
            documents[-1].append(row)
        else:
            documents.append([row])
        before = text
    kept = {random.Random(f"{min(rows)} {seed}").choice(sorted(rows)) for rows in documents}
    return sorted(items.keys() - kept)


def _why_not(item: Item, tokenizer: Tokenizer, plan: EvaluationPlan, most: int) -> tuple[str, int]:
    """Why an item is not asked, empty if it is; and its tokens with those of its answer."""
    if not item.one_form:
        return (
            "with an answer that has no one order (run them with another harness, and give its "
            "logs to `indexcache eval compare`)"
        ), 0
    size = most + 1
    if len(item.text) <= _CHARACTERS * most:
        size = sum(map(len, pieces(item, tokenizer)))
    if size > most:
        return f"longer than {most:,} tokens (the longest --length, or the model's context)", size
    if size <= plan.selects_all:
        return (
            f"of at most {plan.selects_all:,} tokens (index_topk), where no pattern matters",
            size,
        )
    return "", size


def _told(
    name: str,
    rows: int,
    taken: Sequence[SelectedRows],
    left: Mapping[str, int],
    plan: EvaluationPlan,
) -> str:
    parts = [
        f"{len(cell.rows):,} at {cell.length:,} tokens"
        + (
            f" (all that it has, of {plan.contexts:,} asked for)"
            if cell.available < plan.contexts
            else ""
        )
        for cell in taken
    ]
    asked = sum(len(cell.rows) for cell in taken)
    said = f"{name}: {asked:,} of {rows:,} rows are asked"
    said += f": {', '.join(parts)}." if parts else "."
    unasked = sum(cell.available - len(cell.rows) for cell in taken)
    reasons = [f"{count:,} {why}" for why, count in left.items()]
    if unasked:
        reasons.append(f"{unasked:,} more than --contexts {plan.contexts:,}")
    return said + (f" Left out: {'; '.join(reasons)}." if reasons else "")
