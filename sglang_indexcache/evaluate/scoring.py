"""Teacher-forced scoring: the right answers are fed in, to see if the model would have said them.

With the answer behind the question, greedy decoding gives the right answer if and only if each of
its tokens is the likeliest one at its place. So one prefill of the context, whose prefix stays in
the server's cache, and a short extension for each question give accuracy, the loss of the answer,
and the distribution at each of its tokens; nothing is decoded.

SGLang's ``/generate``: the cached prefix is used up to ``logprob_start_len``, so that is the
question's last token, and the first entry that comes back is empty. Whoever asks from position 0
forbids the cache and computes the context once for every question.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sglang_indexcache.errors import QualityError, ServerUnavailableError
from sglang_indexcache.evaluate.evaluation import LEAST_LIKELY, TOP, Answer, Arm, Top
from sglang_indexcache.evaluate.tasks import Context, Question
from sglang_indexcache.pattern import PATTERN_OF_REQUEST

_DIGITS = 6
"""Decimals of log-probabilities, so that a journal gives back what was compared."""
_LEAST_SECONDS, _LEAST_RATE = 600.0, 1000.0
"""A call may take ten minutes, and a second more for every 1,000 tokens."""


class Engine(Protocol):
    """What is needed of a server: ``client.Client``."""

    @property
    def url(self) -> str:
        """Where it answers."""

    def generate(self, *, timeout: float | None = None, **body: Any) -> Any:
        """SGLang's native generate, for a list of prompts; ``timeout`` in seconds."""


@dataclass(frozen=True)
class ArmRequest:
    """As which arm a context is asked.

    Attributes:
        arm: the reference, a candidate or the positive control.
        repeat: 1 for the second asking of the reference (A/A).
        key: of the cached prefixes, which no other arm may share (SGLang's ``extra_key``).
        parameters: ``sampling_params`` of its requests besides those of everybody.
    """

    arm: Arm
    repeat: int = 0
    key: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scored:
    """One arm's answers to the questions of a context.

    Attributes:
        answers: to each question.
        cached: tokens of the context that were cached before it was asked for the first time.
        computed: tokens that the server computed, all together.
        patterns: what each reply says that it was made under, as it came.
    """

    answers: tuple[Answer, ...]
    cached: int
    computed: int
    patterns: tuple[Any, ...] = ()


def score(engine: Engine, context: Context, requests: Sequence[ArmRequest]) -> list[Scored]:
    """Teacher-force every question of a context, for several arms in the same batches.

    Raises:
        ServerUnavailableError: no answer, or the server gave a request up.
        QualityError: an answer that is not one to what was asked.
    """
    warmed = _ask(engine, [context.ids] * len(requests), requests)
    asked = [
        (request, question, context.ids + question.ids)
        for request in requests
        for question in context.questions
    ]
    infos = _ask(
        engine,
        [ids + question.answer for _, question, ids in asked],
        [request for request, _, _ in asked],
        return_logprob=True,
        logprob_start_len=[len(ids) - 1 for _, _, ids in asked],
        top_logprobs_num=TOP,
    )
    count = len(context.questions)
    found = []
    for place, (request, first) in enumerate(zip(requests, warmed, strict=True)):
        part = infos[place * count : (place + 1) * count]
        found.append(
            Scored(
                tuple(
                    _answer(info, request, context, question)
                    for info, question in zip(part, context.questions, strict=True)
                ),
                first["cached_tokens"],
                sum(one["prompt_tokens"] - one["cached_tokens"] for one in (first, *part)),
                tuple(one.get(PATTERN_OF_REQUEST) for one in (first, *part)),
            )
        )
    return found


def _ask(
    engine: Engine, prompts: list[list[int]], requests: Sequence[ArmRequest], **body: Any
) -> list[dict[str, Any]]:
    """Each prompt's ``meta_info``, once it is found to be of that prompt; nothing is decoded."""
    replies = engine.generate(
        timeout=_LEAST_SECONDS + sum(map(len, prompts)) / _LEAST_RATE,
        input_ids=prompts,
        sampling_params=[
            {"max_new_tokens": 0, "temperature": 0.0, **request.parameters} for request in requests
        ],
        extra_key=[request.key for request in requests],
        **body,
    )
    if not isinstance(replies, list) or len(replies) != len(prompts):
        raise QualityError(
            f"{engine.url} answered {len(prompts)} prompts with something else. Is it SGLang's own "
            "/generate, without a proxy that changes what goes through?"
        )
    return [_checked(engine, *pair) for pair in zip(replies, map(len, prompts), strict=True)]


def _checked(engine: Engine, reply: Any, length: int) -> dict[str, Any]:
    """Refuse what is no reply to a prompt of ``length`` tokens."""
    info = reply.get("meta_info") if isinstance(reply, dict) else None
    if not isinstance(info, dict) or not {"prompt_tokens", "cached_tokens"} <= set(info):
        raise QualityError(
            f"{engine.url} answered something that is no reply of SGLang's /generate. Is there "
            "another program at this address?"
        )
    if (info.get("finish_reason") or {}).get("type") == "abort":
        reason = info["finish_reason"].get("message", "without a reason")
        raise ServerUnavailableError(f"{engine.url} gave a request up: {reason}")
    if info["prompt_tokens"] != length:
        raise QualityError(
            f"{engine.url} read {info['prompt_tokens']:,} of a prompt's {length:,} tokens: it cuts "
            "long prompts. Start it without --allow-auto-truncate and with a --context-length that "
            "holds them, or ask for shorter ones (--length)."
        )
    return info


def _answer(
    info: Mapping[str, Any], request: ArmRequest, context: Context, question: Question
) -> Answer:
    """What came back for the answer's tokens."""
    entries = list(info.get("input_token_logprobs") or [])[1:]
    rows = list(info.get("input_top_logprobs") or [])[1:]
    if len(entries) != len(question.answer) or len(rows) != len(entries):
        raise QualityError(
            f"the server scored {len(entries)} of an answer's {len(question.answer)} tokens. Is it "
            "an SGLang that knows logprob_start_len and top_logprobs_num?"
        )
    # SGLang reports the vocabulary's last entry as 0 (it keeps image placeholders out that way).
    for entry, token, row in zip(entries, question.answer, rows, strict=True):
        if entry[1] not in (token, 0) or not row:
            raise QualityError(
                "the server scored other tokens than those that were asked for. Is there something "
                "between it and this command that changes prompts?"
            )
        if not all(math.isfinite(one[0]) and one[0] <= 1e-3 for one in (entry, *row)):
            raise QualityError(
                "the server answered with a log-probability that is none. Look at its log for NaN; "
                "a wrong --kv-cache-dtype or a broken checkpoint gives such answers."
            )
    tops = [
        sorted(((int(i), float(p)) for p, i, *_ in row), key=lambda one: -one[1]) for row in rows
    ]
    return Answer(
        request.arm.name,
        request.repeat,
        context.name,
        question.name,
        context.task,
        context.length,
        None if question.depth is None else round(question.depth, _DIGITS),
        right=all(entry[0] >= top[0][1] for entry, top in zip(entries, tops, strict=True)),
        tokens=len(question.answer),
        logprobs=tuple(round(float(entry[0]), _DIGITS) for entry in entries),
        tops=tuple(_kept(top) for top in tops),
        trace=round(sum(p for top in tops for _, p in top), _DIGITS),
    )


def _kept(top: Top) -> Top:
    likely = [(i, round(p, _DIGITS)) for i, p in top if p >= LEAST_LIKELY]
    return likely or [(top[0][0], round(top[0][1], _DIGITS))]
