"""Closeness of a pattern to the model with all indexers, in addition to its loss.

A pattern may recall more than all F and still be another model. The divergence of the two
next-token distributions shows this, in running text and where something far back is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sglang_indexcache.lab.search.difference import ENOUGH, Difference, by_document
from sglang_indexcache.lab.search.recall import KEYS, KINDS, PASSAGES, Kinds
from sglang_indexcache.lab.stats.pairs import Floats

RECALLED = (KINDS[PASSAGES], KINDS[KEYS])
"""Kinds of tokens that follow from something far back."""
SMALL_LOSS = 0.02
"""Share of recalled tokens that a recommended pattern may lose."""


@dataclass(frozen=True)
class TokenChanges:
    """Predictions of one sequence's tokens under a pattern, compared with all F.

    Each field is ``[length - 1]`` float64; entry i is for the prediction of token i + 1, and is NaN
    if that does not count.

    Attributes:
        loss: loss under the pattern, in nats.
        kl: KL(all F || pattern) of the distributions, in nats.
        kept: 1 if the same token is likeliest under both, else 0.
        right: 1 if the text's token is likeliest under the pattern, else 0.
    """

    loss: Floats
    kl: Floats
    kept: Floats
    right: Floats


@dataclass(frozen=True)
class Judged:
    """Means over the counted tokens of one batch; all except the first are by kind of token."""

    loss: float
    losses: Mapping[str, float]
    kl: Mapping[str, float]
    kept: Mapping[str, float]
    right: Mapping[str, float]

    @classmethod
    def of(cls, changes: TokenChanges, kinds: Kinds) -> Judged:
        """Average a sequence's changes; ``kinds`` are ``[length - 1]``."""

        def by_kind(values: Floats) -> dict[str, float]:
            return {
                name: float(values[kinds == kind].mean())
                for kind, name in enumerate(KINDS)
                if kind and (kinds == kind).any()
            }

        loss = float(changes.loss[kinds > 0].mean())
        parts = (changes.loss, changes.kl, changes.kept, changes.right)
        return cls(loss, *map(by_kind, parts))

    @property
    def mixed_loss(self) -> float:
        """Loss as a mean over kinds of tokens, in nats, which decides among patterns.

        Running text has most tokens, so in the mean over tokens it would outweigh what is recalled.
        """
        return float(np.mean(list(self.losses.values())))

    @property
    def recall(self) -> float:
        """Share of recalled tokens that are right, over their kinds; of all tokens if none are."""
        recalled = [share for kind, share in self.right.items() if kind in RECALLED]
        return float(np.mean(recalled or list(self.right.values())))

    def numbers(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Faithfulness:
    """Comparison of a pattern with all F; every number is a mean over documents.

    Attributes:
        kl: divergence by kind, in nats.
        kept: share of likeliest tokens that stay the same, by kind.
        recall: change in the share of recalled tokens that are right.
        loss: change of the loss, in nats per token.
        full_recall, full_loss: values of all F.
    """

    kl: Mapping[str, float]
    kept: Mapping[str, float]
    recall: Difference
    loss: Difference
    full_recall: float
    full_loss: float

    @classmethod
    def of(
        cls, judged: Sequence[Judged], full: Sequence[Judged], documents: Sequence[int]
    ) -> Faithfulness:
        """Compare batches with the same under all F; a document's windows are one observation.

        Raises:
            SearchError: fewer than two documents.
        """
        recall, full_recall = (np.array([each.recall for each in side]) for side in (judged, full))
        loss, full_loss = (np.array([each.loss for each in side]) for side in (judged, full))
        return cls(
            _means([each.kl for each in judged], documents),
            _means([each.kept for each in judged], documents),
            Difference.of(recall - full_recall, documents),
            Difference.of(loss - full_loss, documents),
            float(by_document(full_recall, documents).mean()),
            float(by_document(full_loss, documents).mean()),
        )

    @property
    def loses_little(self) -> bool:
        """Whether recall is kept except for :data:`SMALL_LOSS`."""
        return self.recall.mean > -SMALL_LOSS

    @property
    def is_shown_to_lose_little(self) -> bool:
        """Whether the whole interval shows a loss of recall below :data:`SMALL_LOSS`.

        Few documents that are all alike have an interval without a width, which shows nothing.
        """
        recall = self.recall
        has_spread = recall.low < recall.high or len(recall.each) >= ENOUGH
        return has_spread and recall.low > -SMALL_LOSS

    def in_words(self) -> str:
        """Return everything as one line of text."""
        low, high = self.loss.low, self.loss.high
        loss = f"loss {self.loss.mean:+.4f} nats ({low:+.4f} to {high:+.4f})"
        return "; ".join([*self.beside_loss(), loss])

    def beside_loss(self) -> Iterator[str]:
        """Yield a clause each on recall, divergence and likeliest tokens."""
        yield "KL to all F " + ", ".join(f"{kind} {v:.3f}" for kind, v in self.kl.items())
        yield "likeliest tokens kept " + ", ".join(f"{k} {v:.1%}" for k, v in self.kept.items())
        low, high = 100 * self.recall.low, 100 * self.recall.high
        yield f"recall {100 * self.recall.mean:+.1f} points ({low:+.1f} to {high:+.1f})"

    def numbers(self) -> dict[str, Any]:
        """Return everything as plain data, without the documents one by one."""
        return {
            "kl": {kind: round(value, 6) for kind, value in self.kl.items()},
            "likeliest_kept": {kind: round(value, 6) for kind, value in self.kept.items()},
            "recall": {"all_full": round(self.full_recall, 6), **self.recall.numbers(sign=-1)},
            "loss": {"all_full": round(self.full_loss, 6), **self.loss.numbers()},
        }


def _means(shares: Sequence[Mapping[str, float]], documents: Sequence[int]) -> dict[str, float]:
    """Average values by kind, over the documents that have the kind."""
    means = {}
    for kind in KINDS:
        having = [
            (s[kind], number) for s, number in zip(shares, documents, strict=True) if kind in s
        ]
        if having:
            values, numbers = zip(*having, strict=True)
            means[kind] = float(by_document(np.array(values), numbers).mean())
    return means
