"""What will be asked, in which order, and what that costs: fixed before the first request."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.evaluation import CONTROL_LOOK, Planned
from sglang_indexcache.evaluate.tasks import (
    CONTROL,
    TASKS,
    UNSCORED,
    Context,
    Item,
    Question,
    Tokenizer,
    make_context,
)
from sglang_indexcache.evaluate.tasks.items import Message, as_context, has_template, rendered
from sglang_indexcache.stats.pairs import Cell
from sglang_indexcache.stats.power import Design, spread_over_cells
from sglang_indexcache.support.words import counted

AGAIN_EVERY = 4
"""The reference is asked twice (A/A) on every so-manieth context of a cell."""
CONTROL_SHARE = 0.75
"""Of ``index_topk``: the length of the contexts in which every pattern selects everything."""
CONTROL_CONTEXTS = 2
"""Of each task."""
DISCORDANCE, CORRELATION = 0.02, 0.1
"""Assumed before anything is measured: paired questions that differ, and how they do together."""
PAGE = 64
"""Tokens of a cache page: what is left of a context's last one is computed for each question."""
SHORTEST, LEFT_FREE = 32 * 1024, 1024
"""Tokens: the first length where none is given, and what of a model's context stays free."""
_SLACK = 32
"""Tokens of a prompt that a template may add, or of a message where there is none."""
JUDGED = ("aa-lcr", "helmet", "longbench-chat", "longfact", "simpleqa")
"""Benchmarks whose answers are graded by another model."""


def default_lengths(context: int | None) -> tuple[int, ...]:
    """Lengths to ask where none is given: from 32Ki, doubled, up to the model's context.

    The last is that context to two digits: 200,000 for 202,752. What stays free is an eighth of a
    small one.

    Args:
        context: tokens that the model takes; None if its config does not say, then to 128Ki.
    """
    room = 4 * SHORTEST if context is None else context - min(LEFT_FREE, context // 8)
    found = [SHORTEST << n for n in range(32) if SHORTEST << n <= room]
    step: int = 10 ** max(len(str(room)) - 2, 0)
    last = room // step * step
    return (*found, last) if not found or last > found[-1] else tuple(found)


@dataclass(frozen=True)
class Taken:
    """Rows of a user's file that make a cell.

    Attributes:
        task: of the file.
        length: tokens that hold each of them with its answer, and the next smaller length does not.
        rows: their numbers, in the order of asking.
        sizes: tokens of each, with its answer.
        available: rows of the file that belong to this cell.
    """

    task: str
    length: int
    rows: tuple[int, ...]
    sizes: tuple[int, ...]
    available: int


@dataclass(frozen=True)
class Plan:
    """What will be asked.

    Attributes:
        tasks: names of generated tasks; may be empty if there are files.
        lengths: tokens of a context with its longest question and that one's answer.
        contexts: of each task at each length.
        questions: behind one context.
        selects_all: ``index_topk``.
        margin: see :class:`~sglang_indexcache.stats.power.Design`.
        looks: likewise.
        seed: of the first context of each cell; the others count from there.
        taken: rows of a user's files.

    Raises:
        QualityError: what cannot be asked, or could show nothing.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    contexts: int
    questions: int
    selects_all: int
    margin: float = 0.01
    looks: int = 4
    seed: int = 0
    taken: tuple[Taken, ...] = ()

    def __post_init__(self) -> None:
        for task in self.tasks:
            if task.lower() in JUDGED:
                raise QualityError(
                    f"{task} is graded by another model, which this command does not run. Run it "
                    "with lm-eval or evalscope for each arm, then give both logs to `indexcache "
                    "eval compare`."
                )
            if task not in TASKS:
                raise QualityError(f"no task is called {task!r}; there are {', '.join(TASKS)}")
        if not (self.tasks or self.taken) or len(set(self.tasks)) < len(self.tasks):
            raise QualityError("give each task once, and one at least")
        short = [length for length in self.lengths if length <= self.selects_all]
        if short or not self.lengths:
            raise QualityError(
                f"a context of {', '.join(map(str, short)) or 'no'} tokens can show nothing: up to "
                f"{self.selects_all} tokens (index_topk) this model's queries select everything, "
                f"whatever is shared. Take longer ones (--length), such as "
                f"{8 * self.selects_all}; the control below is asked by itself."
            )
        if self.questions < 1:
            raise QualityError(f"{self.questions} questions behind a context; ask one at least")
        if self.contexts < self.looks:
            raise QualityError(
                f"{counted(self.contexts, 'context')} of each task and length cannot be looked at "
                f"{self.looks} times; give more (--contexts) or look less often (--looks)"
            )
        _ = self.design  # refuses a margin or looks that no design can have

    @property
    def design(self) -> Design:
        """Of all cells together that a verdict counts; of all there are if it counts none."""
        contexts = sum(map(len, self.scored.values())) or sum(map(len, self.cells.values()))
        return Design(contexts, margin=self.margin, looks=self.looks)

    @cached_property
    def cells(self) -> dict[Cell, Sequence[int]]:
        """Numbers of their contexts in the order of asking: seeds, or rows of a file."""
        seeds = range(self.seed, self.seed + self.contexts)
        found: dict[Cell, Sequence[int]] = {
            (task, length): seeds for length in self.lengths for task in self.tasks
        }
        return found | {(cell.task, cell.length): cell.rows for cell in self.taken}

    @property
    def scored(self) -> dict[Cell, Sequence[int]]:
        """Those in which an answer is right or wrong."""
        return {cell: rows for cell, rows in self.cells.items() if cell[0] != UNSCORED}

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Tokens of a file's contexts, by name; all others have their cell's length."""
        return {
            _name(cell.task, cell.length, row): size
            for cell in self.taken
            for row, size in zip(cell.rows, cell.sizes, strict=True)
        }

    @property
    def longest(self) -> int:
        """Tokens of the longest context with its question and answer."""
        return max(self.sizes.values(), default=0) if not self.tasks else max(self.lengths)

    def questions_of(self, task: str) -> int:
        """Behind one of its contexts; one behind a file's."""
        return self.questions if task in self.tasks else 1

    @property
    def control_length(self) -> int:
        """Tokens of the control's contexts."""
        return int(CONTROL_SHARE * self.selects_all)

    @cached_property
    def planned(self) -> tuple[Planned, ...]:
        """Every context, in the order of asking: the control, then round by round over the cells.

        So each look has the same share of every cell, and whatever drifts hits all cells alike.
        """
        control = [
            Planned(_name(task, self.control_length, n), task, self.control_length, 0, False)
            for n in range(CONTROL_CONTEXTS)
            for task in self.tasks or (CONTROL,)
        ]
        rounds = [
            (
                n / len(rows),
                Planned(
                    _name(task, length, row),
                    task,
                    length,
                    n * self.looks // len(rows) + 1,
                    n % AGAIN_EVERY == 0,
                ),
            )
            for (task, length), rows in self.cells.items()
            for n, row in enumerate(rows)
        ]
        rounds.sort(key=lambda one: one[0])  # cells stay in their order
        return (*control, *(planned for _, planned in rounds))

    @property
    def identity(self) -> dict[str, Any]:
        """What a journal of this plan must agree with."""
        taken = [
            [cell.task, cell.length, list(cell.rows), list(cell.sizes), cell.available]
            for cell in self.taken
        ]
        return {
            "tasks": list(self.tasks),
            "lengths": list(self.lengths),
            "contexts": self.contexts,
            "questions": self.questions,
            "selects_all": self.selects_all,
            "margin": self.margin,
            "looks": self.looks,
            "seed": self.seed,
            **({"taken": taken} if taken else {}),
        }

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> Plan:
        """The plan with this identity."""
        values = dict(identity)
        values["tasks"], values["lengths"] = tuple(values["tasks"]), tuple(values["lengths"])
        values["taken"] = tuple(
            Taken(task, length, tuple(rows), tuple(sizes), available)
            for task, length, rows, sizes, available in values.get("taken", ())
        )
        return cls(**values)


@dataclass(frozen=True)
class Material:
    """What the contexts of a plan are made of.

    Attributes:
        tokenizer: of the model.
        haystack: running text.
        questions: behind one context.
        items: rows of a user's files, by task and number.
    """

    tokenizer: Tokenizer
    haystack: str
    questions: int
    items: Mapping[str, Mapping[int, Item]] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Of everything that contexts are made of, but for their tasks."""
        pieces = sorted(self.tokenizer.get_vocab().items())
        made_of: tuple[object, ...] = (pieces, self.haystack)
        if self.items:
            made_of += ({task: dict(items) for task, items in self.items.items()},)
        return hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]

    def make(self, planned: Planned) -> Context:
        """A planned context; the same on every call.

        The control is so short that fewer questions may fit behind it.

        Raises:
            QualityError: not even one fits, or the haystack is too short for the task.
        """
        seed = int(planned.context.rpartition("-")[2])
        if planned.task in self.items:
            item = self.items[planned.task][seed]
            return as_context(
                item, planned.task, self.tokenizer, planned.length, planned.context, seed
            )
        questions = self.questions
        while True:
            try:
                return make_context(
                    planned.task,
                    self.tokenizer,
                    planned.length,
                    seed,
                    haystack=self.haystack,
                    questions=questions,
                )
            except QualityError as error:
                if planned.look != CONTROL_LOOK:
                    raise
                if questions == 1:
                    raise QualityError(
                        f"{planned.task} has no control: not even one question fits "
                        f"{planned.length} tokens, where every pattern must agree. Leave it out "
                        "(--task)."
                    ) from error
                questions //= 2

    def conversation(self, context: Context, question: Question) -> tuple[Message, ...]:
        """A question with its context as chat messages."""
        if context.messages:
            return context.messages
        text = self.tokenizer.decode(context.ids + question.ids)
        return ({"role": "user", "content": text},)

    def count(self, messages: tuple[Message, ...]) -> tuple[int, int]:
        """Tokens of a conversation, and how many another program may add or leave away.

        A server writes it with the model's own chat template, so hardly any; if the tokenizer has
        none, the server knows one of its own.
        """
        slack = _SLACK if has_template(self.tokenizer) else _SLACK * (1 + len(messages))
        return len(rendered(messages, self.tokenizer)), slack


@dataclass(frozen=True)
class Cost:
    """What an evaluation computes at most.

    Attributes:
        tokens: by length of the contexts.
        rate: tokens that are computed in a second; None if nobody knows yet.

    Raises:
        QualityError: a rate that is not above 0.
    """

    tokens: Mapping[int, int]
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.rate is not None and self.rate <= 0:
            raise QualityError(f"a rate of {self.rate:g} tokens a second is not above 0 (--rate)")

    @property
    def total(self) -> int:
        """Tokens."""
        return sum(self.tokens.values())

    @property
    def hours(self) -> float | None:
        """Of the server or servers; None without a rate."""
        return self.total / self.rate / 3600 if self.rate else None


def cost(
    plan: Plan,
    arms: int,
    tails: Mapping[str, int],
    rate: float | None = None,
    *,
    chat: bool = False,
) -> Cost:
    """What the whole plan computes, if nothing is decided early.

    Args:
        plan: what will be asked.
        arms: asked on every context: the reference, the candidates and the positive control.
        tails: tokens of a question and its answer, by task; none of a file's, which is all context.
        rate: tokens that are computed in a second.
        chat: whether chat completions are asked, where every question's prompt counts whole: what
            an engine takes from a cache is not known.
    """
    tokens = dict.fromkeys(sorted({*plan.lengths, plan.control_length}), 0)
    for planned in plan.planned:
        size, tail = plan.sizes.get(planned.context, planned.length), tails.get(planned.task, 0)
        questions = plan.questions_of(planned.task)
        one = size + questions * (tail + (size - tail) % PAGE)
        if chat:
            one = questions * (size + _SLACK)
        continued = planned.task == UNSCORED  # by the reference, before all others are asked
        tokens[planned.length] += one * (arms + planned.again + continued)
    return Cost(tokens, rate)


def tails(plan: Plan, material: Material) -> dict[str, int]:
    """Tokens of a question with its answer, on average, from a short context of each task."""
    found = {}
    for task in plan.tasks:
        length = min(plan.lengths)
        context = material.make(Planned(_name(task, length, plan.seed), task, length, 1, False))
        asked = [len(question.ids) + len(question.answer) for question in context.questions]
        found[task] = round(sum(asked) / len(asked))
    return found


def detectable(plan: Plan) -> float:
    """Smallest loss that the whole plan finds with the design's power, as assumed beforehand."""
    return plan.design.detectable(*_assumed(plan))


def needed(plan: Plan) -> int:
    """Contexts with which the margin would be shown of a pattern that loses nothing."""
    return plan.design.needed(*_assumed(plan))


def mend(plan: Plan) -> str:
    """How to show the margin, where that needs more contexts than are planned."""
    if light := _lightest(plan):
        return (
            f"{light.task} at {light.length:,} tokens has only {len(light.rows):,} and counts as "
            "much as every other cell: give more rows of it, or leave it out (that file, or that "
            "--length)"
        )
    if plan.tasks or any(len(cell.rows) < cell.available for cell in plan.taken):
        return "Plan more (--contexts)"
    return "The files have no more: ask generated tasks beside them (--task)"


def _lightest(plan: Plan) -> Taken | None:
    """The smallest cell, if the plan would show a smaller loss without it."""
    scored = [cell for cell in plan.taken if (cell.task, cell.length) in plan.scored]
    if len(plan.scored) < 2 or not scored:
        return None
    light = min(scored, key=lambda cell: len(cell.rows))
    if len(light.rows) == max(map(len, plan.scored.values())):
        return None
    others = replace(plan, taken=tuple(cell for cell in plan.taken if cell != light))
    return light if detectable(others) < detectable(plan) else None


def _assumed(plan: Plan) -> tuple[float, float, float]:
    cells = (plan.scored or plan.cells).items()
    asked = [(len(rows), plan.questions_of(task)) for (task, _), rows in cells]
    return spread_over_cells(asked, DISCORDANCE, CORRELATION)


def check_fits(plan: Plan, most: int | None, where: str) -> None:
    """Refuse contexts that a server does not take.

    Args:
        plan: what will be asked.
        most: tokens of a prompt that it takes; None if it does not say.
        where: the server's address.

    Raises:
        QualityError: a length is above that.
    """
    longest = plan.longest
    if most is not None and longest > most:
        raise QualityError(
            f"a context of {longest:,} tokens with question and answer does not fit {where}, which "
            f"takes prompts of {most:,}. Ask for shorter ones (--length), or start it with a "
            "larger --context-length and --max-total-tokens."
        )


def _name(task: str, length: int, seed: int) -> str:
    return f"{task}-{length}-{seed}"
