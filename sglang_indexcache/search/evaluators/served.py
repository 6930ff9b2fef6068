"""Losses from a running SGLang in live mode: the engine that will serve the pattern, as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from sglang_indexcache.ask.protocol import RankState, check_answered_under, named
from sglang_indexcache.errors import SearchError, ServerUnavailableError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.calibration import Calibration
from sglang_indexcache.search.evaluators import BatchLosses, Floats

_LEAST_SECONDS = 600.0
_LEAST_RATE = 1000.0
"""Tokens a second: an engine that prefills fewer than these is taken for one that hangs."""


class LiveEngine(Protocol):
    """What the evaluator needs of an engine: ``serving.Client``, or an in-process engine."""

    def states(self) -> list[RankState]:
        """What IndexCache reports, one entry per data-parallel rank."""

    def generate(self, *, timeout: float | None = None, **body: Any) -> Any:
        """SGLang's native generate, for a list of prompts; ``timeout`` in seconds."""


class ServedEvaluator:
    """Teacher-forced input log-probabilities of a running engine, which may serve others too.

    Each request names its pattern, each answer says under which it was made, and both are compared;
    a request for log-probabilities from position 0 never reads the radix cache, and each answer is
    checked for that. All sequences of a call go out as one request, so data-parallel ranks work
    side by side. What the engine is was checked at the start, and is again at every call: it may
    have been restarted in between.

    Calls may be made from several threads, if the engine takes them.

    Args:
        engine: in live mode. What it serves to others, and under which pattern, does not matter.
        calibration: what to measure on.
        timeout: seconds that one call may take. The default grows with its tokens: ten minutes,
            and a second for every 1,000; times ``at_once``, as a call may wait for the others.
        at_once: calls that are made at the same time.
        priority: of the requests, as SGLang counts it; None names none.

    Attributes:
        checkpoint: what the engine says it serves; differs between checkpoints of other shapes.

    Raises:
        SearchError: the engine is not in live mode.
        ServerUnavailableError: it does not answer now.
    """

    in_flight = 1

    def __init__(
        self,
        engine: LiveEngine,
        calibration: Calibration,
        timeout: float | None = None,
        *,
        at_once: int = 1,
        priority: int | None = None,
    ) -> None:
        self._engine, self._timeout, self._at_once = engine, timeout, at_once
        self._urgency = {} if priority is None else {"priority": priority}
        self.calibration = calibration
        self.batch_tokens = calibration.batch_tokens
        self.checkpoint = _checkpoint(engine.states())
        self.num_layers = len(self.checkpoint[1])

    def loss(self, pattern: Pattern, batches: Sequence[int]) -> BatchLosses:
        """See :class:`~sglang_indexcache.search.evaluators.Evaluator`."""
        tokens = sum(self.batch_tokens[batch] for batch in batches)
        losses = self.token_losses(pattern, batches)
        counted = self.calibration.counted_in(batches)
        return BatchLosses.of_tokens(losses, tokens * self.num_layers, counted)

    def token_losses(self, pattern: Pattern, batches: Sequence[int]) -> list[list[Floats]]:
        """See :class:`~sglang_indexcache.search.evaluators.TokenEvaluator`."""
        self._check_checkpoint()
        cut = self.calibration.batches
        sequences = [list(ids) for batch in batches for ids in cut[batch]]
        tokens = sum(map(len, sequences))
        replies = self._engine.generate(
            timeout=self._timeout or self._at_once * (_LEAST_SECONDS + tokens / _LEAST_RATE),
            input_ids=sequences,
            sampling_params={
                "max_new_tokens": 1,
                "temperature": 0.0,
                "ignore_eos": True,
                **named(str(pattern)),
            },
            return_logprob=True,
            logprob_start_len=0,
            **self._urgency,
        )
        pairs = zip(replies, sequences, strict=True)
        found = iter([_losses(reply, ids, pattern) for reply, ids in pairs])
        self._check_checkpoint()
        return [[next(found) for _ in cut[batch]] for batch in batches]

    def _check_checkpoint(self) -> None:
        """That the engine serves what it served at the start."""
        found = _checkpoint(self._engine.states())
        if found != self.checkpoint:
            raise SearchError(
                f"the engine was restarted with another checkpoint: {' '.join(found)}, before it "
                f"was {' '.join(self.checkpoint)}. Restart it with the one of --model; the same "
                "command then goes on."
            )


def _checkpoint(states: list[RankState]) -> tuple[str, str]:
    """Architecture, and which layers have an indexer, of an engine in live mode."""
    [state, *_] = states
    if state.mode != "live":
        raise SearchError(
            "the engine runs in static mode, where shared layers have no indexer. Start it "
            "with --indexcache-mode live."
        )
    return state.checkpoint


def _losses(reply: Any, ids: list[int], pattern: Pattern) -> Floats:
    """``[length - 1]`` nats, from SGLang's ``input_token_logprobs`` ((log-prob, id, text) each)."""
    info = reply["meta_info"]
    if (info.get("finish_reason") or {}).get("type") == "abort":
        reason = info["finish_reason"].get("message", "without a reason")
        raise ServerUnavailableError(f"the engine gave a sequence up: {reason}")
    check_answered_under(info, str(pattern), "the engine")
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
