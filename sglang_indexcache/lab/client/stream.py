"""One streamed request of one or more prompts, timed by the client and checked to the token.

It resembles SGLang's ``benchmark/one_batch_server.py``, but that script measures one server to the
end, checks neither ``cached_tokens`` nor the server's count of prompt tokens, and never asks for
the pattern. Every chunk carries ``index`` and cumulative ``completion_tokens``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_indexcache.errors import ServerError
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.serving.client_rules import check_answered_under
from sglang_indexcache.serving.protocol import named


@dataclass
class StreamedAnswer:
    """Answer to one prompt: arrivals of its chunks, and SGLang's ``meta_info`` of the last chunk.

    ``arrivals`` are pairs of seconds since the request was sent and tokens generated so far.
    """

    arrivals: list[tuple[float, int]] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def first_token(self) -> float:
        """TTFT in seconds."""
        return self.arrivals[0][0]

    @property
    def last_token(self) -> float:
        """Time to the last token in seconds."""
        return self.arrivals[-1][0]

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first chunk; there must be more than one chunk."""
        (start, before), (end, after) = self.arrivals[0], self.arrivals[-1]
        if end <= start:
            raise ServerError(
                f"all {after} tokens of an answer arrived at once, which gives no decode rate. Ask "
                "for more --new-tokens, or start the servers without --stream-interval."
            )
        return (after - before) / (end - start)


Clock = Callable[[], float]
"""Function that returns seconds since some fixed moment."""


def stream(
    client: Client,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    clock: Clock = time.perf_counter,
    pattern: str | None = None,
) -> list[StreamedAnswer]:
    """Send ``prompts`` (token ids) at once and generate exactly ``new_tokens`` for each.

    Args:
        pattern: the F/S string that the request names, for a server in live mode.

    Raises:
        ServerError: the server refused or disconnected, or did not give a full, uncached answer to
            every prompt under ``pattern``.
    """
    sampling: dict[str, Any] = {"max_new_tokens": new_tokens, "temperature": 0.0}
    sampling["ignore_eos"] = True
    if pattern is not None:
        sampling |= named(pattern)
    answers = [StreamedAnswer() for _ in prompts]
    started = clock()
    for chunk in client.stream(
        input_ids=[list(prompt) for prompt in prompts], sampling_params=sampling
    ):
        now = clock() - started
        answer = answers[chunk.get("index", 0)]
        answer.meta = chunk["meta_info"]
        answer.arrivals.append((now, answer.meta["completion_tokens"]))
    for answer, prompt in zip(answers, prompts, strict=True):
        _check(answer, len(prompt), new_tokens, pattern, client.name)
    return answers


def _check(
    answer: StreamedAnswer, length: int, new_tokens: int, pattern: str | None, server: str
) -> None:
    """Refuse an answer that would make the measurement wrong."""
    meta = answer.meta
    reason = meta.get("finish_reason")
    if not answer.arrivals or reason is None:
        raise ServerError(f"{server} ended an answer before it was finished.")
    if reason["type"] == "abort":
        raise ServerError(f"{server} refused a request: {reason.get('message', reason)}")
    if reason["type"] != "length":  # only SGLang's NaN check can stop earlier
        raise ServerError(f"{server} stopped an answer early: {reason}.")
    if pattern is not None:
        check_answered_under(meta, pattern, server)
    if meta["prompt_tokens"] != length:
        raise ServerError(
            f"{server} read {meta['prompt_tokens']} tokens of a {length}-token prompt. Start it "
            "with a --context-length and a KV pool that take the whole prompt."
        )
    if meta["cached_tokens"]:
        raise ServerError(
            f"{server} took {meta['cached_tokens']} of {length} prompt tokens from its cache, so "
            "its time is not that of a prefill. Start it with --disable-radix-cache, or let nobody "
            "else use it."
        )
    if meta["completion_tokens"] != new_tokens:
        raise ServerError(
            f"{server} generated {meta['completion_tokens']} of {new_tokens} tokens and stopped: "
            f"{reason}"
        )
    if meta.get("num_retractions"):
        raise ServerError(
            "the KV cache ran full and the server put a request back. Ask for fewer --new-tokens, "
            "or let nobody else use it."
        )
