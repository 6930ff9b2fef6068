"""What a search works with: an evaluator that is ready, and what is known about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import SearchError
from sglang_indexcache.library import Library, ModelInfo
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.entries import Provenance
from sglang_indexcache.search.evaluator import Evaluator, TokenEvaluator
from sglang_indexcache.support.provenance import versions


@dataclass(frozen=True)
class Setup:
    """An evaluator over data, with its provenance.

    Attributes:
        evaluator: measures.
        checkpoint: what is measured, as far as patterns are concerned.
        model: for the pattern library.
        identity: hashes and kind of evaluator; a journal belongs to one identity.
        data: the data in words.
        seed: of the data's shuffle.
    """

    evaluator: Evaluator
    checkpoint: Checkpoint
    model: ModelInfo
    identity: Mapping[str, str]
    data: str
    seed: int

    @property
    def token_evaluator(self) -> TokenEvaluator:
        """The evaluator, if it knows the loss of every token.

        Raises:
            SearchError: a made-up landscape does not.
        """
        if not hasattr(self.evaluator, "token_losses"):
            raise SearchError("a made-up landscape has no tokens; give --model")
        return self.evaluator  # type: ignore[return-value]

    def resolve(self, value: str) -> Pattern:
        """A pattern in any form that :meth:`Library.resolve` takes."""
        return Library.default().resolve(value, self.checkpoint).pattern

    def provenance(self, name: str = "") -> Provenance:
        """For the files that a search writes."""
        prefix = name or self.model.name
        return Provenance(prefix, self.model, self.data, self.identity, versions(), self.seed)
