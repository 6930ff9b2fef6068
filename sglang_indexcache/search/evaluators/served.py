"""Losses from a running SGLang in live mode: the engine that will serve the pattern, as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np

from sglang_indexcache.errors import SearchError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.calibration import Calibration
from sglang_indexcache.search.evaluators import BatchLosses, Floats, TokenEvaluator


class LiveEngine(Protocol):
    """What the evaluator needs of an engine: ``serving.Client``, or an in-process engine."""

    def states(self) -> list[dict[str, Any]]:
        """What IndexCache reports, one entry per data-parallel rank."""

    def switch_pattern(self, value: str) -> list[dict[str, Any]]:
        """Make ``value`` the pattern on every rank; returns the new states."""

    def generate(self, **body: Any) -> Any:
        """SGLang's native generate, for a list of prompts."""


class ServedEvaluator:
    """Teacher-forced input log-probabilities of a running engine.

    Between two patterns the engine flushes its radix cache, and a request for log-probabilities
    from position 0 never reads it; each answer is checked for both. All sequences of a call go
    out as one request, so data-parallel ranks work side by side.

    Args:
        engine: in live mode. Nobody else may switch it meanwhile; that is checked too.
        calibration: what to measure on.

    Raises:
        SearchError: the engine is not in live mode.
    """

    in_flight = 1

    def __init__(self, engine: LiveEngine, calibration: Calibration) -> None:
        self._engine = engine
        self.calibration = calibration
        self.batch_tokens = calibration.batch_tokens
        [state, *_] = engine.states()
        if state["mode"] != "live":
            raise SearchError(
                "the engine runs in static mode, where shared layers have no indexer. Start it "
                "with --indexcache-mode live."
            )
        self.num_layers = len(state["checkpoint_pattern"])

    def loss(self, pattern: Pattern, batches: Sequence[int]) -> BatchLosses:
        """See :class:`~sglang_indexcache.search.evaluators.Evaluator`."""
        tokens = sum(self.batch_tokens[batch] for batch in batches)
        losses = self.token_losses(pattern, batches)
        counted = self.calibration.counted_in(batches)
        return BatchLosses.of_tokens(losses, tokens * self.num_layers, counted)

    def token_losses(self, pattern: Pattern, batches: Sequence[int]) -> list[list[Floats]]:
        """See :class:`~sglang_indexcache.search.evaluators.TokenEvaluator`."""
        before = self._switch(pattern)
        cut = self.calibration.batches
        sequences = [list(ids) for batch in batches for ids in cut[batch]]
        replies = self._engine.generate(
            input_ids=sequences,
            sampling_params={"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=0,
        )
        losses = [_losses(reply, ids) for reply, ids in zip(replies, sequences, strict=True)]
        self._check_undisturbed(before)
        found = iter(losses)
        return [[next(found) for _ in cut[batch]] for batch in batches]

    def _switch(self, pattern: Pattern) -> list[dict[str, Any]]:
        states = self._engine.states()
        if any(state["pattern"] != str(pattern) for state in states):
            states = self._engine.switch_pattern(str(pattern))
        if any(state["pattern"] != str(pattern) for state in states):
            raise SearchError(f"the engine did not switch to {pattern} on every rank")
        return states

    def _check_undisturbed(self, before: list[dict[str, Any]]) -> None:
        after = self._engine.states()
        if [s["switches"] for s in before] != [s["switches"] for s in after]:
            raise SearchError(
                "somebody else switched the engine's pattern during an evaluation. Search on an "
                "engine of its own, then start the search again: it resumes."
            )


def _losses(reply: Any, ids: list[int]) -> Floats:
    """``[length - 1]`` nats, from SGLang's ``input_token_logprobs`` ((log-prob, id, text) each)."""
    info = reply["meta_info"]
    if info["cached_tokens"]:
        raise SearchError(
            f"the engine answered from its cache ({info['cached_tokens']} tokens), which may be "
            "another pattern's. Start it with --disable-radix-cache."
        )
    entries = info["input_token_logprobs"][1:]
    # SGLang reports the vocabulary's last entry as 0 (it keeps image placeholders out that way).
    if len(entries) != len(ids) - 1 or any(
        entry[1] not in (token, 0) for entry, token in zip(entries, ids[1:], strict=True)
    ):
        raise SearchError(
            f"the engine scored {len(entries)} tokens of a {len(ids)}-token sequence, or others. "
            "Is the context longer than its --context-length?"
        )
    losses = -np.array([entry[0] for entry in entries], dtype=np.float64)
    if not np.isfinite(losses).all():
        raise SearchError("the engine answered with a log-probability that is not a number")
    return losses


class EvaluatorPool:
    """Several evaluators of the same checkpoint and data, each measuring another candidate.

    Hands each question to a member that is free; safe to call from ``in_flight`` threads.

    Raises:
        SearchError: no members, or members that differ in layers or data.
    """

    def __init__(self, members: Sequence[TokenEvaluator]) -> None:
        if not members:
            raise SearchError("a pool needs at least one evaluator")
        shapes = {(member.num_layers, member.batch_tokens) for member in members}
        if len(shapes) != 1:
            raise SearchError("the engines of a pool must serve the same checkpoint and data")
        [(self.num_layers, self.batch_tokens)] = shapes
        self.in_flight = len(members)
        self._free: SimpleQueue[TokenEvaluator] = SimpleQueue()
        for member in members:
            self._free.put(member)

    def loss(self, pattern: Pattern, batches: Sequence[int]) -> BatchLosses:
        """See :class:`~sglang_indexcache.search.evaluators.Evaluator`."""
        with self._member() as member:
            return member.loss(pattern, batches)

    def token_losses(self, pattern: Pattern, batches: Sequence[int]) -> list[list[Floats]]:
        """See :class:`~sglang_indexcache.search.evaluators.TokenEvaluator`."""
        with self._member() as member:
            return member.token_losses(pattern, batches)

    @contextmanager
    def _member(self) -> Iterator[TokenEvaluator]:
        member = self._free.get()
        try:
            yield member
        finally:
            self._free.put(member)
