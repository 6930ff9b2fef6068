"""What the contexts of a plan are made of, and each context made of it, the same on every call."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.plan import CONTROL_LOOK, Planned
from sglang_indexcache.evaluate.tasks import TASKS
from sglang_indexcache.evaluate.tasks.chat import Tokenizer
from sglang_indexcache.evaluate.tasks.context import Context, Question, make_context
from sglang_indexcache.evaluate.tasks.files import Item, pieces

SKIP, MOST_SKIPPED = 1_000_000, 4
"""A seed from which no context can be made is raised by so much, so many times."""


@dataclass(frozen=True)
class Corpus:
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
        template = getattr(self.tokenizer, "chat_template", None)
        items = {task: dict(items) for task, items in self.items.items()}
        made_of = (pieces, template, self.haystack, items)
        return hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]

    def make(self, planned: Planned) -> Context:
        """A planned context; the same on every call.

        Raises:
            QualityError: no context of this task has this length, or the haystack is too short.
        """
        return self._made(planned)[0]

    def check(self, planned: Iterable[Planned], on_context: Callable[[], None]) -> list[str]:
        """Make every context once, before anything is asked.

        Args:
            planned: what will be asked.
            on_context: is called after each.

        Returns:
            A sentence for each context that had to be made from another seed.

        Raises:
            QualityError: see :meth:`make`.
        """
        told = []
        for one in planned:
            if said := self._made(one)[1]:
                told.append(f"{one.context} is made from {said}")
            on_context()
        return told

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
        """A row of a file: one question, which the whole prompt belongs to."""
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
        raise QualityError(
            f"{planned.task} has no control: not even one question fits {planned.length} tokens, "
            "where every pattern must agree. Leave it out (--task)."
        )

    def _generated(self, planned: Planned, seed: int, questions: int) -> Context:
        made = make_context(
            *(planned.task, TASKS[planned.task], self.tokenizer, planned.length, seed),
            haystack=self.haystack,
            questions=questions,
        )
        return replace(made, name=planned.context)
