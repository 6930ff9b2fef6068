"""Evaluators, which tell a search algorithm how much is lost under a pattern.

They compute ``EvalLoss(M, D, c)`` of the paper's Algorithm 1 per calibration batch, so that two
patterns can be compared batch by batch (paired) and a candidate can be dropped before it has seen
all data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from sglang_indexcache.lab.client.pool import Pool
from sglang_indexcache.lab.client.score import Prompt, TokenScores, score
from sglang_indexcache.lab.data.marking import Mask
from sglang_indexcache.lab.search.calibration import Calibration
from sglang_indexcache.lab.search.judged import Judged, TokenChanges
from sglang_indexcache.pattern import Pattern

Floats = NDArray[np.float64]
_Job = TypeVar("_Job")

TOPS = 16
"""Number of likeliest tokens that a server reports at each place, for comparing distributions."""
LEAST = 1e-6
"""Least probability assumed for all other tokens together, because rounding may leave them none."""


class Evaluator(Protocol):
    """Measurement of patterns on a fixed set of calibration batches.

    The same pattern on the same batch must give the same loss, and no pattern may profit from
    another pattern's state.
    """

    @property
    def kind(self) -> str:
        """Kind of measurement, for a journal's identity, because two kinds are never mixed."""

    @property
    def num_layers(self) -> int:
        """Length of a pattern."""

    @property
    def batch_tokens(self) -> tuple[int, ...]:
        """Number of tokens in each calibration batch."""

    @property
    def in_flight(self) -> int:
        """Number of patterns that can be measured at the same time (from as many threads)."""

    @property
    def by_batch(self) -> bool:
        """Whether many patterns on one batch cost less than one pattern on many batches."""

    def loss(self, pattern: Pattern, batches: Sequence[int]) -> Floats:
        """Return ``[batches]`` float64, the mean loss per counted token on each batch, in nats."""

    def judge(self, pattern: Pattern, batches: Sequence[int]) -> list[Judged]:
        """Return each batch's comparison of ``pattern`` with all F."""


PAIRS = ("similarity", "kept_mass", "kept_list")
"""Methods of an evaluator that compare layers by pairs: see :mod:`.hf`, and of servers
:class:`~sglang_indexcache.lab.search.lists.ReturningEvaluator`. Each returns ``[M, N, N]``, its
ways to rate a pair, the one to trust first."""

LISTS = 16
"""Attention is compared on the best tokens of a list, at most one for so many tokens of a text. On
a real model, lists as long as an eighth of the text hid which layers a 1/8 needs
(benchmarks/results/smollm2/real-model.md)."""
RATINGS = 2
"""Number of ways in which attention rates a pair."""


def pair_forwards(kind: str, num_layers: int) -> int:
    """Return the number of forwards that the matrices of :data:`PAIRS` take.

    For ``similarity`` layer i runs i + 1 times; for the others each layer runs once.
    """
    return -(-(num_layers + 1) // 2) if kind == "similarity" else 1


class TokenEvaluator(ABC):
    """An :class:`Evaluator` that also shows where in the context the loss arises."""

    kind: str
    num_layers: int
    in_flight: int
    by_batch = False

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self.batch_tokens = calibration.batch_tokens

    @abstractmethod
    def token_losses(self, pattern: Pattern, batches: Sequence[int]) -> list[Floats]:
        """Return ``[length - 1]`` losses in nats, by batch.

        Entry i is the loss of predicting token i + 1 from tokens 0..i; it may be NaN if that
        prediction does not count.
        """

    @abstractmethod
    def changes(self, pattern: Pattern, batches: Sequence[int]) -> list[TokenChanges]:
        """Return the changes that ``pattern`` makes to each prediction, by batch."""

    def judge(self, pattern: Pattern, batches: Sequence[int]) -> list[Judged]:
        """See :class:`Evaluator`."""
        kinds = self.calibration.kinds
        changes = zip(batches, self.changes(pattern, batches), strict=True)
        return [Judged.of(of_batch, kinds[batch]) for batch, of_batch in changes]

    def loss(self, pattern: Pattern, batches: Sequence[int]) -> Floats:
        """See :class:`Evaluator`.

        Every batch has the same weight, however many of its predictions count, because patterns are
        compared batch by batch.
        """
        losses = zip(batches, self.token_losses(pattern, batches), strict=True)
        counted = self.calibration.counted
        return np.array([of_batch[counted[batch]].mean() for batch, of_batch in losses])


def in_threads(do: Callable[[_Job], None], jobs: Iterable[_Job], at_once: int) -> None:
    """Do every job, at most ``at_once`` at a time, and stop at the first error.

    The threads are daemons, so that an interrupted search does not wait for a server's answer. One
    job at a time runs here, without a thread.
    """
    pending, ended = deque(jobs), SimpleQueue[BaseException | None]()
    if at_once == 1:
        for job in pending:
            do(job)
        return

    def work() -> None:
        error: BaseException | None = None
        while error is None:
            try:
                job = pending.popleft()
            except IndexError:
                break
            try:
                do(job)
            except BaseException as raised:  # passed to the waiting thread below
                error = raised
        ended.put(error)

    try:
        threads = [Thread(target=work, daemon=True) for _ in range(min(at_once, len(pending)))]
        for thread in threads:
            thread.start()
        for _ in threads:
            if (error := ended.get()) is not None:
                raise error
    finally:  # after an error or Ctrl-C the rest is not done
        pending.clear()


class ServedEvaluator(TokenEvaluator):
    """Teacher-forced log-probabilities of running engines, which may serve others too.

    Each request names its pattern. All sequences of a call go out as one request, so data-parallel
    ranks work in parallel. Calls may be made from ``in_flight`` threads. Other requests to the
    pool's engines, under any pattern, do not matter.
    """

    kind = "sglang"

    def __init__(self, pool: Pool, calibration: Calibration) -> None:
        super().__init__(calibration)
        self._pool = pool
        self._own = Pattern(pool.checkpoint[1])
        self.num_layers = len(self._own)
        self._full: dict[int, TokenScores] = {}
        self.in_flight = pool.in_flight

    def token_losses(self, pattern: Pattern, batches: Sequence[int]) -> list[Floats]:
        """See :class:`TokenEvaluator`."""
        return [-np.array(each.logprobs) for each in self._scores(pattern, batches, top=0)]

    def changes(self, pattern: Pattern, batches: Sequence[int]) -> list[TokenChanges]:
        """See :class:`TokenEvaluator`; the divergence is that of :func:`likeliest_kl`."""
        for batch in batches:
            if batch not in self._full:
                [self._full[batch]] = self._scores(self._own, [batch], top=TOPS)
        if pattern == self._own:
            scores = [self._full[batch] for batch in batches]
        else:
            scores = self._scores(pattern, batches, top=TOPS)
        data, counted = self.calibration.sequences, self.calibration.counted
        return [
            _changes(data[batch], counted[batch], self._full[batch], under)
            for batch, under in zip(batches, scores, strict=True)
        ]

    def _scores(self, pattern: Pattern, batches: Sequence[int], *, top: int) -> list[TokenScores]:
        """Ask for the log-probabilities of each sequence."""
        sequences = [self.calibration.sequences[batch] for batch in batches]
        # Prompts are scored from their beginning, so that no engine reads them from its cache.
        prompts = [Prompt(ids, str(pattern), scored=len(ids) - 1) for ids in sequences]
        return [*self._pool.ask(lambda engine: score(engine, prompts, top=top))]


def _changes(ids: Sequence[int], mask: Mask, full: TokenScores, under: TokenScores) -> TokenChanges:
    """Compare a sequence's scores under a pattern with those under all F."""
    loss, kl, kept, right = np.full((4, len(mask)), np.nan)
    for place in np.flatnonzero(mask).tolist():
        token = ids[place + 1]
        before = dict(full.tops[place]) | {token: full.logprobs[place]}
        after = dict(under.tops[place]) | {token: under.logprobs[place]}
        loss[place] = -under.logprobs[place]
        kl[place] = likeliest_kl(before, after)
        likeliest = under.tops[place][0][0]
        kept[place] = likeliest == full.tops[place][0][0]
        right[place] = likeliest == token
    return TokenChanges(loss, kl, kept, right)


def likeliest_kl(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Return the divergence in nats over tokens that both report, with all others merged into one.

    It never exceeds that of the whole distributions, since merging tokens can only lower it.

    Args:
        before, after: log-probabilities of some tokens in nats.
    """
    common = [token for token in before if token in after]
    p, q = (np.exp([side[token] for token in common]) for side in (before, after))
    p, q = (np.append(part, max(1 - part.sum(), 0.0)) for part in (p, q))
    # Rounding may leave no probability for the other tokens.
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(p > 0, p * np.log(p / np.maximum(q, LEAST)), 0.0)
    return max(float(terms.sum()), 0.0)
