"""The steady state of a batch of streamed answers: when all of them were decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_indexcache.ask.stream import StreamedAnswer
from sglang_indexcache.errors import BenchError


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


def steady_window(answers: Sequence[StreamedAnswer]) -> Window:
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
    tokens = sum(_tokens_at(answer, end) - _tokens_at(answer, start) for answer in answers)
    return Window(start, end, tokens)


def _tokens_at(answer: StreamedAnswer, when: float) -> float:
    """Tokens generated at ``when``, interpolated between two chunks."""
    before = (0.0, 0)
    for time, tokens in answer.arrivals:
        if time >= when:
            share = (when - before[0]) / (time - before[0]) if time > before[0] else 1.0
            return before[1] + share * (tokens - before[1])
        before = (time, tokens)
    return float(before[1])
