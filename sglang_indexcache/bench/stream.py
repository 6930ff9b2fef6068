"""One streamed request of one or more prompts, timed by the client and checked to the token.

Like SGLang's ``benchmark/one_batch_server.py``: a batch travels as one ``/generate`` call, every
chunk carries ``index`` and cumulative ``completion_tokens``. That program cannot be used as it is:
it measures one server to the end (no interleaving), does not look at ``cached_tokens`` or at the
prompt length that the server counted, and never asks which pattern served.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_indexcache.ask.protocol import check_answered_under, named
from sglang_indexcache.client import Client
from sglang_indexcache.errors import BenchError


@dataclass
class Answer:
    """What came back for one prompt.

    Attributes:
        arrivals: ``(seconds since the request was sent, tokens generated so far)`` of each chunk.
        meta: SGLang's ``meta_info`` of the last chunk.
    """

    arrivals: list[tuple[float, int]] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def first_token(self) -> float:
        """TTFT, seconds."""
        return self.arrivals[0][0]

    @property
    def last_token(self) -> float:
        """Seconds to the last token."""
        return self.arrivals[-1][0]

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first chunk.

        Raises:
            BenchError: everything came in one chunk, or the clock stood still.
        """
        (start, before), (end, after) = self.arrivals[0], self.arrivals[-1]
        if end <= start:
            raise BenchError(
                f"all {after} tokens of an answer arrived at once, which gives no decode rate. Ask "
                "for more --new-tokens, or start the servers without --stream-interval."
            )
        return (after - before) / (end - start)

    def tokens_at(self, when: float) -> float:
        """Tokens generated at ``when``, interpolated between two chunks."""
        before = (0.0, 0)
        for time_, tokens in self.arrivals:
            if time_ >= when:
                share = (when - before[0]) / (time_ - before[0]) if time_ > before[0] else 1.0
                return before[1] + share * (tokens - before[1])
            before = (time_, tokens)
        return float(before[1])


Clock = Callable[[], float]
"""Seconds since some moment."""


def stream(
    client: Client,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    clock: Clock = time.perf_counter,
    pattern: str | None = None,
) -> list[Answer]:
    """Send ``prompts`` at once and generate exactly ``new_tokens`` for each.

    Args:
        client: of the server.
        prompts: token ids.
        new_tokens: at least 1.
        clock: read at every arrival.
        pattern: F/S, that the request names, as a server in live mode allows.

    Raises:
        BenchError: anything but a full, uncached answer to every prompt, under ``pattern``.
        ServerError: the server refused or went away.
    """
    sampling: dict[str, Any] = {"max_new_tokens": new_tokens, "temperature": 0.0}
    sampling["ignore_eos"] = True
    if pattern is not None:
        sampling |= named(pattern)
    answers = [Answer() for _ in prompts]
    started = clock()
    for chunk in client.stream(
        input_ids=[list(prompt) for prompt in prompts], sampling_params=sampling
    ):
        now = clock() - started
        answer = answers[chunk.get("index", 0)]
        answer.meta = chunk["meta_info"]
        answer.arrivals.append((now, answer.meta["completion_tokens"]))
    for answer, prompt in zip(answers, prompts, strict=True):
        _check(answer, len(prompt), new_tokens, pattern, f"the server at {client.url}")
    return answers


def _check(answer: Answer, length: int, new_tokens: int, pattern: str | None, server: str) -> None:
    """Refuse an answer that would make a wrong figure."""
    meta = answer.meta
    reason = meta.get("finish_reason")
    if not answer.arrivals or reason is None:
        raise BenchError("the server ended an answer before it was finished. Nothing is reported.")
    if reason["type"] == "abort":
        raise BenchError(f"the server refused a request: {reason.get('message', reason)}")
    if reason["type"] != "length":  # end of sequence is off: what else stops is SGLang's NaN check
        raise BenchError(f"the server stopped an answer early: {reason}. Nothing is reported.")
    if pattern is not None:
        check_answered_under(meta, pattern, server)
    if meta["prompt_tokens"] != length:
        raise BenchError(
            f"the server read {meta['prompt_tokens']} tokens of a {length}-token prompt. Start it "
            "with a --context-length and a KV pool that take the whole prompt."
        )
    if meta["cached_tokens"]:
        raise BenchError(
            f"the server took {meta['cached_tokens']} of {length} prompt tokens from its cache, so "
            "its time is not that of a prefill. Start it with --disable-radix-cache, or let nobody "
            "else use it."
        )
    if meta["completion_tokens"] != new_tokens:
        raise BenchError(
            f"the server generated {meta['completion_tokens']} of {new_tokens} tokens and stopped: "
            f"{reason}"
        )
    if meta.get("num_retractions"):
        raise BenchError(
            "the KV cache ran full and the server put a request back. Ask for fewer requests at "
            "once (--full-concurrency) or fewer --new-tokens."
        )


@dataclass(frozen=True)
class Window:
    """The span in which every request of a batch was decoding.

    Attributes:
        start: the last request's first token, seconds since the batch was sent.
        end: the first request's last token.
        tokens: generated in between, by all requests.
    """

    start: float
    end: float
    tokens: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / (self.end - self.start)


def steady_window(answers: Sequence[Answer]) -> Window:
    """The steady state of a batch, as SGLang's ``benchmark/stream_metrics.py`` defines it.

    Raises:
        BenchError: one request had ended before another began.
    """
    start = max(answer.first_token for answer in answers)
    end = min(answer.last_token for answer in answers)
    if end <= start:
        raise BenchError(
            f"{len(answers)} requests never decoded all at once: one ended before another had its "
            "first token. Ask for more --new-tokens or fewer requests (--full-concurrency)."
        )
    tokens = sum(answer.tokens_at(end) - answer.tokens_at(start) for answer in answers)
    return Window(start, end, tokens)
