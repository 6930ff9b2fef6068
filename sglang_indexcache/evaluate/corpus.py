"""What the contexts of a plan are made of, and each context made of it, the same on every call."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.evaluation import CONTROL_LOOK, Planned
from sglang_indexcache.evaluate.plan import EvaluationPlan
from sglang_indexcache.evaluate.tasks import Context, Item, Tokenizer, make_context
from sglang_indexcache.evaluate.tasks.items import as_context

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
        made_of: tuple[object, ...] = (pieces, self.haystack)
        if self.items:
            made_of += ({task: dict(items) for task, items in self.items.items()},)
        return hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]

    def make(self, planned: Planned) -> Context:
        """A planned context; the same on every call.

        Raises:
            QualityError: no context of this task has this length, or the haystack is too short.
        """
        return self._made(planned)[0]

    def check(self, plan: EvaluationPlan, on_context: Callable[[], None]) -> list[str]:
        """Make every context of a plan once, before anything is asked.

        Args:
            plan: what will be asked.
            on_context: is called after each.

        Returns:
            A sentence for each context that had to be made from another seed.

        Raises:
            QualityError: see :meth:`make`.
        """
        told = []
        for planned in plan.planned:
            _, seed, why = self._made(planned)
            if why:
                told.append(f"{planned.context} is made from seed {seed} instead: {why}")
            on_context()
        return told

    def _made(self, planned: Planned) -> tuple[Context, int, str]:
        """A context, its seed, and why that is not the one in its name.

        The control is so short that fewer questions may fit behind it.
        """
        seed, questions, why = int(planned.context.rpartition("-")[2]), self.questions, ""
        if planned.task in self.items:
            item = self.items[planned.task][seed]
            name = planned.context
            context = as_context(item, planned.task, self.tokenizer, planned.length, name, seed)
            return context, seed, ""
        control = planned.look == CONTROL_LOOK
        for attempt in range(questions.bit_length() if control else MOST_SKIPPED + 1):
            skipped = 0 if control else attempt * SKIP
            try:
                context = make_context(
                    planned.task,
                    self.tokenizer,
                    planned.length,
                    seed + skipped,
                    haystack=self.haystack,
                    questions=questions,
                )
                return replace(context, name=planned.context), seed + skipped, why * bool(skipped)
            except QualityError as error:
                why = why or str(error)
                questions = questions // 2 if control and questions > 1 else questions
        if control:
            why = (
                f"{planned.task} has no control: not even one question fits {planned.length} "
                "tokens, where every pattern must agree. Leave it out (--task)."
            )
        raise QualityError(why)
