"""Put the right answers in the model's mouth, and see whether it would have said them.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sglang_indexcache.ask.protocol import check_answered_under, named
from sglang_indexcache.errors import QualityError, ServerUnavailableError
from sglang_indexcache.evaluate.evaluation import Answer, Planned
from sglang_indexcache.evaluate.tasks import Context, Question

TOP = 20
"""Likeliest tokens that are asked for at each place of an answer."""
_LEAST_LIKELY = math.log(1e-4)
"""Of those, what is less likely is not kept: it weighs nothing, and a journal would be of it."""
_NOTHING = 1e-9
"""A probability that rounding leaves of none."""
_DIGITS = 6
"""Decimals of log-probabilities, so that a journal gives back what was compared."""
_LEAST_SECONDS, _LEAST_RATE = 600.0, 1000.0
"""A call may take ten minutes, and a second more for every 1,000 tokens."""

Top = list[tuple[int, float]]
"""The likeliest ids at a place with their log-probabilities in nats, best first."""


class Engine(Protocol):
    """What is needed of a server: ``client.Client``."""

    @property
    def url(self) -> str:
        """Where it answers."""

    def generate(self, *, timeout: float | None = None, **body: Any) -> Any:
        """SGLang's native generate, for a list of prompts; ``timeout`` in seconds."""


@dataclass(frozen=True)
class Voice:
    """As whom a server is asked.

    Attributes:
        key: of the cached prefixes, which are shared with no other voice (SGLang's ``extra_key``).
        parameters: ``sampling_params`` of its requests besides those of everybody.
        pattern: F/S, which its requests name and its answers must name; "" where none is named.
    """

    key: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    pattern: str = ""


@dataclass(frozen=True)
class Said:
    """How a voice took one question.

    Attributes:
        question: its name.
        depth: see :class:`~sglang_indexcache.evaluate.evaluation.Answer`.
        tokens: of the right answer.
        logprobs: of those tokens, in nats; empty if the model answered by itself.
        tops: the likeliest tokens at their places.
        trace: sum of every log-probability that came back; two patterns have the same one only
            where they compute the same.
        right: whether the answer is right to the letter; None where no answer is known.
        reply: what the model answered by itself.
        score: the task's official metric.
        cut: whether the reply was ended by its length.
    """

    question: str
    depth: float | None
    tokens: int
    logprobs: list[float] = field(default_factory=list)
    tops: list[Top] = field(default_factory=list)
    trace: float | None = None
    right: bool | None = None
    reply: str | None = None
    score: float | None = None
    cut: bool = False


@dataclass(frozen=True)
class Scored:
    """One voice's answers to the questions of a context.

    Attributes:
        said: to each question.
        cached: tokens of the context that were cached before it was asked for the first time.
        computed: tokens that the server computed, all together.
    """

    said: list[Said]
    cached: int
    computed: int


def score(engine: Engine, context: Context, voices: Sequence[Voice]) -> list[Scored]:
    """Teacher-force every question of a context, for several voices in the same batches.

    Raises:
        ServerUnavailableError: no answer, or the server gave a request up.
        QualityError: an answer that is not one to what was asked.
    """
    warmed = ask(engine, [context.ids] * len(voices), voices)
    asked = [
        (voice, question, context.ids + question.ids)
        for voice in voices
        for question in context.questions
    ]
    replies = ask(
        engine,
        [ids + question.answer for _, question, ids in asked],
        [voice for voice, _, _ in asked],
        return_logprob=True,
        logprob_start_len=[len(ids) - 1 for _, _, ids in asked],
        top_logprobs_num=TOP,
    )
    infos = [reply["meta_info"] for reply in replies]
    count = len(context.questions)
    found = []
    for place, reply in enumerate(warmed):
        first, part = reply["meta_info"], infos[place * count : (place + 1) * count]
        found.append(
            Scored(
                [_read(info, q) for info, q in zip(part, context.questions, strict=True)],
                first["cached_tokens"],
                sum(computed(info) for info in (first, *part)),
            )
        )
    return found


def answer(said: Said, planned: Planned, arm: str, repeat: int, reference: Said | None) -> Answer:
    """What is recorded of a question becomes what is judged.

    Args:
        said: how it was answered.
        planned: behind which context.
        arm: whose answer it is.
        repeat: 1 for the second asking of the reference.
        reference: the reference's answer; None for the reference itself, or where it has none.
    """
    compared = said.tops and reference is not None and len(reference.tops) == len(said.tops)
    pairs = list(zip(reference.tops, said.tops, strict=True)) if compared and reference else []
    return Answer(
        arm,
        repeat,
        planned.context,
        said.question,
        planned.task,
        planned.length,
        said.depth,
        right=said.right,
        # What the reference said is likeliest for the reference: no loss in that.
        nll=-sum(said.logprobs) / len(said.logprobs)
        if said.logprobs and said.right is not None
        else None,
        kl=_mean([divergence(*pair) for pair in pairs]),
        agreement=_mean([float(first[0][0] == second[0][0]) for first, second in pairs]),
        tokens=said.tokens,
        reply=said.reply,
        score=said.score,
    )


def divergence(first: Sequence[tuple[int, float]], second: Sequence[tuple[int, float]]) -> float:
    """Kullback-Leibler divergence in nats, from below, of what was kept of two distributions.

    Joining outcomes never raises it: those that only the first names are one outcome, and all that
    is left is another. Of how the second divides its own rest between these two, only the most that
    the first can have is known (what is not named is less likely than what was kept); the division
    with the least divergence is taken.
    """
    known = dict(second)
    both = [(p, known[token]) for token, p in first if token in known]
    alone = [p for token, p in first if token not in known]
    mine, left = _total(alone), 1 - _total(p for _, p in first)
    theirs = 1 - _total(q for _, q in both)
    least = second[-1][1] if len(second) >= TOP else _LEAST_LIKELY
    most = min(len(alone) * math.exp(least), theirs * mine / max(mine + left, _NOTHING))
    joined = sum(
        p * math.log(p / max(q, _NOTHING))
        for p, q in ((mine, most), (left, theirs - most))
        if p > _NOTHING
    )
    return max(0.0, sum(math.exp(p) * (p - q) for p, q in both) + joined)


def _total(logprobs: Iterable[float]) -> float:
    return sum(map(math.exp, logprobs))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def ask(
    engine: Engine,
    prompts: list[list[int]],
    voices: Sequence[Voice],
    new_tokens: Sequence[int] | int = 0,
    **body: Any,
) -> list[dict[str, Any]]:
    """Each prompt's reply, once it is found to be of that prompt.

    Args:
        engine: the server.
        prompts: token ids.
        voices: one for each prompt.
        new_tokens: to generate at most, greedily; one number for all, or one for each.
        body: besides, as SGLang wants it.

    Raises:
        ServerUnavailableError: no answer, or the server gave a request up.
        QualityError: no reply of SGLang's, or one to another prompt.
        ServerError: a reply that was not made under the voice's pattern, or does not say so.
    """
    limits = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else new_tokens
    replies = engine.generate(
        timeout=patience(sum(map(len, prompts))),
        input_ids=prompts,
        sampling_params=[
            {
                "max_new_tokens": limit,
                "temperature": 0.0,
                **voice.parameters,
                **(named(voice.pattern) if voice.pattern else {}),
            }
            for voice, limit in zip(voices, limits, strict=True)
        ],
        extra_key=[voice.key for voice in voices],
        **body,
    )
    if not isinstance(replies, list) or len(replies) != len(prompts):
        raise QualityError(
            f"{engine.url} answered {len(prompts)} prompts with something else. Is it SGLang's own "
            "/generate, without a proxy that changes what goes through?"
        )
    for reply, prompt, voice in zip(replies, prompts, voices, strict=True):
        _check(engine, reply, len(prompt))
        if voice.pattern:
            check_answered_under(reply["meta_info"], voice.pattern, engine.url)
    return replies


def patience(tokens: int) -> float:
    """Seconds that an answer to prompts of so many tokens may take."""
    return _LEAST_SECONDS + tokens / _LEAST_RATE


def _check(engine: Engine, reply: Any, length: int) -> None:
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


def _read(info: Mapping[str, Any], question: Question) -> Said:
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
    return Said(
        question.name,
        None if question.depth is None else round(question.depth, _DIGITS),
        len(question.answer),
        logprobs=[round(float(entry[0]), _DIGITS) for entry in entries],
        tops=[_kept(top) for top in tops],
        trace=round(sum(p for top in tops for _, p in top), _DIGITS),
        right=all(entry[0] >= top[0][1] for entry, top in zip(entries, tops, strict=True))
        if question.answer_text
        else None,
    )


def _kept(top: Top) -> Top:
    likely = [(i, round(p, _DIGITS)) for i, p in top if p >= _LEAST_LIKELY]
    return likely or [(top[0][0], round(top[0][1], _DIGITS))]


def computed(info: Mapping[str, Any]) -> int:
    """Tokens of a prompt that the server had to compute."""
    return int(info["prompt_tokens"]) - int(info["cached_tokens"])
