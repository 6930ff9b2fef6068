"""What the contexts of a plan are made of, and each context made of it, the same on every call."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.evaluation import CONTROL_LOOK, Planned
from sglang_indexcache.evaluate.tasks import Context, Item, Tokenizer, make_context
from sglang_indexcache.evaluate.tasks.items import as_context


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
