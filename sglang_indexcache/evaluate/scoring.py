"""Teacher-forced scoring: the right answers are fed in, to see if the model would have said them.

With the answer behind the question, greedy decoding gives the right answer if and only if each of
its tokens is the likeliest one at its place. So one prefill of the context, whose prefix stays in
the server's cache, and a short extension for each question give accuracy, the loss of the answer,
and the distribution at each of its tokens; nothing is decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_indexcache.ask.score import Engine, Prompt, TokenScores, Top, ask
from sglang_indexcache.ask.score import score as score_tokens
from sglang_indexcache.evaluate.evaluation import LEAST_LIKELY, TOP, Answer, Arm
from sglang_indexcache.evaluate.tasks import Context, Question

_DIGITS = 6
"""Decimals of log-probabilities, so that a journal gives back what was compared."""


@dataclass(frozen=True)
class ArmRequest:
    """As which arm a context is asked.

    Attributes:
        arm: the reference, a candidate or the positive control.
        repeat: 1 for the second asking of the reference (A/A).
        key: of the cached prefixes, which no other arm may share (SGLang's ``extra_key``).
        pattern: F/S, which its requests name and its answers must name; "" where none is named.
    """

    arm: Arm
    repeat: int = 0
    key: str = ""
    pattern: str = ""


@dataclass(frozen=True)
class Scored:
    """One arm's answers to the questions of a context.

    Attributes:
        answers: to each question.
        cached: tokens of the context that were cached before it was asked for the first time.
        computed: tokens that the server computed, all together.
    """

    answers: tuple[Answer, ...]
    cached: int
    computed: int


def score(engine: Engine, context: Context, requests: Sequence[ArmRequest]) -> list[Scored]:
    """Teacher-force every question of a context, for several arms in the same batches.

    Raises:
        ServerUnavailableError: no answer, or the server gave a request up.
        ServerError: an answer that is not one to what was asked.
    """
    warmed = ask(engine, [Prompt(context.ids, one.pattern, one.key) for one in requests])
    prompts = [
        Prompt(
            context.ids + question.ids + question.answer,
            one.pattern,
            one.key,
            len(question.answer),
        )
        for one in requests
        for question in context.questions
    ]
    scores = score_tokens(engine, prompts, top=TOP)
    count = len(context.questions)
    found = []
    for place, (request, reply) in enumerate(zip(requests, warmed, strict=True)):
        info, part = reply["meta_info"], scores[place * count : (place + 1) * count]
        answers = tuple(
            _answer(one, request, context, question)
            for one, question in zip(part, context.questions, strict=True)
        )
        computed = info["prompt_tokens"] - info["cached_tokens"]
        computed += sum(one.computed for one in part)
        found.append(Scored(answers, info["cached_tokens"], computed))
    return found


def _answer(
    scores: TokenScores, request: ArmRequest, context: Context, question: Question
) -> Answer:
    """What came back for the answer's tokens."""
    return Answer(
        request.arm.name,
        request.repeat,
        context.name,
        question.name,
        context.task,
        context.length,
        None if question.depth is None else round(question.depth, _DIGITS),
        right=all(own >= top[0][1] for own, top in zip(scores.logprobs, scores.tops, strict=True)),
        tokens=len(question.answer),
        logprobs=tuple(round(own, _DIGITS) for own in scores.logprobs),
        tops=tuple(_kept(top) for top in scores.tops),
        trace=round(sum(p for top in scores.tops for _, p in top), _DIGITS),
    )


def _kept(top: Top) -> Top:
    likely = [(i, round(p, _DIGITS)) for i, p in top if p >= LEAST_LIKELY]
    return likely or [(top[0][0], round(top[0][1], _DIGITS))]
