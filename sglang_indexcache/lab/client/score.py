"""Ask a running engine for the log-probabilities of given tokens (teacher forcing).

SGLang's ``/generate`` scores a prompt's tokens from ``logprob_start_len`` on and uses its prefix
cache up to there; the first entry of the answer is empty. Nothing is decoded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_indexcache.errors import ServerError, ServerUnavailableError
from sglang_indexcache.serving.client_rules import check_answered_under
from sglang_indexcache.serving.protocol import RankState, named

_LEAST_SECONDS, _LEAST_RATE = 600.0, 1000.0
"""Time limit of a call: ten minutes, plus a second for every 1,000 tokens. A slower engine is
considered hung."""

_ABOVE_ZERO = 1e-3
"""Largest amount by which rounding may put a log-probability above zero."""

Top = list[tuple[int, float]]
"""Likeliest token ids at a place with their log-probabilities in nats, best first."""


class Engine(Protocol):
    """Interface of a running engine: ``lab.client.http.Client``, or an engine in this process."""

    @property
    def name(self) -> str:
        """Name of the engine in messages."""

    def states(self) -> list[RankState]:
        """Return IndexCache's report, one entry per data-parallel rank."""

    def generate(self, *, timeout: float | None = None, **body: Any) -> Any:
        """Call SGLang's native generate, for a list of prompts; ``timeout`` in seconds."""


@dataclass(frozen=True)
class Prompt:
    """A sequence of token ids to send.

    Attributes:
        pattern: the F/S string that the request names and the answer must repeat; "" names none.
        key: cached prefixes are shared only among prompts with the same key (``extra_key``).
        scored: number of last tokens that are scored, fewer than all.
    """

    ids: Sequence[int]
    pattern: str = ""
    key: str = ""
    scored: int = 0

    @property
    def start(self) -> int:
        """Value for ``logprob_start_len``: the place before the first scored token."""
        return len(self.ids) - self.scored - 1


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities of a prompt's scored tokens.

    Attributes:
        logprobs: ``[scored]`` in nats.
        tops: ``[scored]``, the likeliest tokens at each place; empty if none were asked for.
        computed: number of prompt tokens that did not come from the prefix cache.
    """

    logprobs: list[float]
    tops: list[Top]
    computed: int


def time_allowed(tokens: int) -> float:
    """Return the seconds that a call may take, from its number of prompt tokens."""
    return _LEAST_SECONDS + tokens / _LEAST_RATE


def score(engine: Engine, prompts: Sequence[Prompt], *, top: int = 0) -> list[TokenScores]:
    """Return the log-probabilities of each prompt's last ``scored`` tokens, given all before them.

    All prompts go out as one request; each scores at least one token. ``top`` is the number of
    likeliest tokens to report at each place.

    Raises:
        ServerUnavailableError: there was no answer, or the engine aborted a request.
        ServerError: the answer does not fit the request.
    """
    body = {"top_logprobs_num": top} if top else {}
    starts = [prompt.start for prompt in prompts]
    replies = ask(engine, prompts, return_logprob=True, logprob_start_len=starts, **body)
    pairs = zip(replies, prompts, strict=True)
    return [_read(reply["meta_info"], prompt, top, engine.name) for reply, prompt in pairs]


def ask(
    engine: Engine,
    prompts: Sequence[Prompt],
    new_tokens: int = 0,
    **body: Any,
) -> list[dict[str, Any]]:
    """Return each prompt's reply after checking that it answers that prompt under its pattern.

    Args:
        new_tokens: largest number of tokens to generate, greedily.

    Raises:
        ServerUnavailableError: there was no answer, or the engine aborted a request.
        ServerError: a reply is not SGLang's, or is for another prompt or pattern.
    """
    if any(prompt.key for prompt in prompts):
        body["extra_key"] = [prompt.key for prompt in prompts]
    replies = engine.generate(
        timeout=time_allowed(sum(len(prompt.ids) for prompt in prompts)),
        input_ids=[list(prompt.ids) for prompt in prompts],
        sampling_params=[
            {"max_new_tokens": new_tokens, "temperature": 0.0}
            | (named(prompt.pattern) if prompt.pattern else {})
            for prompt in prompts
        ],
        **body,
    )
    if not isinstance(replies, list) or len(replies) != len(prompts):
        raise ServerError(
            f"{engine.name} answered {len(prompts)} prompts with something else. Is it SGLang's "
            "own /generate, without a proxy that changes what goes through?"
        )
    for reply, prompt in zip(replies, prompts, strict=True):
        _check(reply, prompt, engine.name)
    return replies


def ask_afresh(engine: Engine, prompt: Prompt, new_tokens: int, **body: Any) -> dict[str, Any]:
    """Return a prompt's reply like :func:`ask`, with no token of the prompt read from the cache.

    Raises:
        ServerUnavailableError: as :func:`ask`.
        ServerError: as :func:`ask`, or tokens came from the cache.
    """
    # SGLang does not read a prompt from its cache if the prompt is scored from the beginning.
    body |= {"return_logprob": True, "logprob_start_len": [0]}
    [reply] = ask(engine, [prompt], new_tokens, **body)
    if cached := int(reply["meta_info"]["cached_tokens"]):
        raise ServerError(
            f"{engine.name} took {cached} tokens of a prompt from its cache, where what another "
            "request computed may stand. Start it with --disable-radix-cache."
        )
    return reply


def _check(reply: Any, prompt: Prompt, server: str) -> None:
    info = reply.get("meta_info") if isinstance(reply, dict) else None
    if not isinstance(info, dict) or not {"prompt_tokens", "cached_tokens"} <= set(info):
        raise ServerError(
            f"{server} answered something that is no reply of SGLang's /generate. Is there another "
            "program at this address?"
        )
    if (info.get("finish_reason") or {}).get("type") == "abort":
        reason = info["finish_reason"].get("message", "without a reason")
        raise ServerUnavailableError(f"{server} gave a request up: {reason}")
    if prompt.pattern:
        check_answered_under(info, prompt.pattern, server)
    if info["prompt_tokens"] != len(prompt.ids):
        raise ServerError(
            f"{server} read {info['prompt_tokens']:,} of a prompt's {len(prompt.ids):,} tokens: it "
            "cuts long prompts. Start it without --allow-auto-truncate and with a "
            "--context-length that holds them, or ask for shorter ones."
        )


def _read(info: Mapping[str, Any], prompt: Prompt, top: int, server: str) -> TokenScores:
    """Read the scores of an answer.

    Raises:
        ServerError: the scores came from the cache, are for other tokens, too few, or no numbers.
    """
    cached = int(info["cached_tokens"])
    if cached > prompt.start:
        raise ServerError(
            f"{server} answered from its cache ({cached} tokens, and the scored ones begin at "
            f"{prompt.start}), which may be another pattern's. Start it with "
            "--disable-radix-cache."
        )
    entries = list(info.get("input_token_logprobs") or [])[1:]
    rows = list(info.get("input_top_logprobs") or [])[1:] if top else []
    _check_tokens(entries, rows if top else None, prompt, server)
    likely = [pair for row in rows for pair in row]
    if not all(rows) or not all(_is_logprob(pair[0]) for pair in (*entries, *likely)):
        raise ServerError(
            f"{server} answered with a log-probability that is none. Look at its log for NaN; a "
            "wrong --kv-cache-dtype or a broken checkpoint gives such answers."
        )
    return TokenScores(
        [float(entry[0]) for entry in entries],
        [sorted(((int(i), float(p)) for p, i, *_ in row), key=lambda x: -x[1]) for row in rows],
        int(info["prompt_tokens"]) - cached,
    )


def _check_tokens(
    entries: Sequence[Any], rows: Sequence[Any] | None, prompt: Prompt, server: str
) -> None:
    """Raise ServerError unless the scored tokens are the requested ones."""
    if len(entries) != prompt.scored or (rows is not None and len(rows) != prompt.scored):
        did = f"scored {len(entries)} tokens"
        if rows is not None and len(entries) == prompt.scored:
            did = f"told the likeliest tokens at {len(rows)} places"
        raise ServerError(
            f"{server} {did} where {prompt.scored} were asked for. Is it an "
            "SGLang that knows logprob_start_len and top_logprobs_num, with a --context-length "
            "that holds the prompt?"
        )
    for entry, token in zip(entries, prompt.ids[len(prompt.ids) - prompt.scored :], strict=True):
        # SGLang reports the vocabulary's last entry as 0, which is how it masks image placeholders.
        if entry[1] not in (token, 0):
            raise ServerError(
                f"{server} scored other tokens than those that were asked for. Is there something "
                "between it and this command that changes prompts?"
            )


def _is_logprob(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value <= _ABOVE_ZERO
