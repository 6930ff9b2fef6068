"""Questions to an evaluation's arms, with checks that each arm answered under its own pattern.

Answers are *teacher-forced*: the right answer follows the question in the prompt, and greedy
decoding would give it if and only if each of its tokens is the likeliest one at its place. So one
prefill of the context, whose prefix stays in the server's cache, and a short extension for each
question give accuracy and the probability of the answer; nothing is decoded.

Each server's identity is checked before a context, and again after it, before an answer counts.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

from sglang_indexcache.errors import QualityError
from sglang_indexcache.lab.client import score as scoring
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.lab.client.score import Prompt, TokenScores
from sglang_indexcache.lab.evaluate.evaluation_plan import Arm
from sglang_indexcache.lab.evaluate.tasks.context import Context, Question
from sglang_indexcache.lab.stats.pairs import Answer
from sglang_indexcache.serving.client_rules import alike, check_obeyed, facts
from sglang_indexcache.serving.protocol import RankState

TOP = 20
"""Number of likeliest tokens requested at each token of an answer, by which arms are told apart."""
_DIGITS = 6
"""Decimals of log-probabilities, so that a journal restores exactly the compared values."""
Asking = tuple[Arm, int]
"""Arm for which a context is asked, and 1 for the second asking of the reference (A/A)."""


class Servers:
    """The servers that answer for the arms.

    Args:
        urls: one server in live mode under the name "", whose requests name their pattern, or one
            server in static mode for each arm's name.

    Raises:
        QualityError: a server is missing, in the wrong mode, or unlike the others.
        ServerError: a server does not run IndexCache.
    """

    def __init__(self, arms: Sequence[Arm], urls: Mapping[str, Client]) -> None:
        self._shared = set(urls) == {""}
        if without := [arm.name for arm in arms if arm.name not in urls and not self._shared]:
            raise QualityError(
                f"no server is given for {', '.join(without)}. Give each arm a --url NAME=URL, or "
                "one --url alone for a server in live mode, which serves them all."
            )
        self._of = {arm.name: urls["" if self._shared else arm.name] for arm in arms}
        if not self._shared:
            _check_alike(self._of)
        for arm in arms[: 1 if self._shared else None]:
            self._states(arm)

    @property
    def all(self) -> list[Client]:
        """Every server, once."""
        return list({id(server): server for server in self._of.values()}.values())

    def check_fits(self, longest: int) -> None:
        """Refuse prompts of this many tokens, with question and answer, if a server takes fewer."""
        for server in self.all:
            most = server.server_info().get("max_req_input_len")
            if isinstance(most, int) and longest > most:
                raise QualityError(
                    f"a context of {longest:,} tokens with question and answer does not fit "
                    f"{server.name}, which takes prompts of {most:,}. Ask for shorter ones "
                    "(--length), or start it with a larger --context-length and "
                    "--max-total-tokens."
                )

    def batches(self, askings: Sequence[Asking]) -> list[list[Asking]]:
        """Group arms that are asked together: all arms of a server, but A/A in a separate batch."""
        if not self._shared:
            return [[asking] for asking in askings]
        parts = ([asking for asking in askings if asking[1] == repeat] for repeat in (0, 1))
        return [part for part in parts if part]

    def ask(
        self, context: Context, askings: Sequence[Asking]
    ) -> list[tuple[tuple[Answer, ...], int]]:
        """Ask a batch of arms about a context; return their answers and the tokens computed.

        Raises:
            ServerUnavailableError: the caller may try again.
            QualityError, ServerError: the server does not do what the arms need.
        """
        server = self._of[askings[0][0].name]
        before = self._states(askings[0][0])
        nonce = uuid.uuid4().hex[:8]  # nothing was cached under these keys before
        keys = [(arm.pattern, f"{nonce}/{arm.pattern}/{repeat}") for arm, repeat in askings]
        warmed = scoring.ask(server, [Prompt(context.ids, *key) for key in keys])
        prompts = [
            Prompt(context.ids + question.ids + question.answer, *key, len(question.answer))
            for key in keys
            for question in context.questions
        ]
        scores = scoring.score(server, prompts, top=TOP)
        patterns = [arm.pattern for arm, _ in askings]
        check_obeyed(before, self._states(askings[0][0]), patterns, server.name)
        results, count = [], len(context.questions)
        for place, (arm, repeat) in enumerate(askings):
            info = warmed[place]["meta_info"]
            if info["cached_tokens"]:
                raise QualityError(
                    f"the server took {info['cached_tokens']:,} tokens of {context.name} from its "
                    "cache, where another arm left them: it shares cached prefixes between "
                    "patterns. Use an SGLang that keeps extra_key apart, start it with "
                    "--disable-radix-cache, or take a server for each arm."
                )
            part = scores[place * count : (place + 1) * count]
            pairs = zip(part, context.questions, strict=True)
            answers = tuple(_answer(*pair, arm, repeat, context) for pair in pairs)
            results.append(
                (answers, info["prompt_tokens"] + sum(scored.computed for scored in part))
            )
        return results

    def _states(self, arm: Arm) -> list[RankState]:
        """Return the states of the arm's server after checking that it can answer for the arm."""
        server = self._of[arm.name]
        states = server.states()
        for state in states:
            if self._shared and state.mode != "live":
                raise QualityError(
                    f"{server.name} does not run in live mode, so it serves one pattern alone. "
                    "Start it with --indexcache-mode live, or start one server for each arm and "
                    "give each as --url NAME=URL."
                )
            if not self._shared and state.pattern != arm.pattern:
                raise QualityError(
                    f"{server.name} is given for {arm.name}, which is {arm.pattern}, and runs "
                    f"{state.pattern}. Start it with --indexcache-pattern {arm.pattern}."
                )
        return states


def right_share(scores: TokenScores, *, by_token: bool) -> float:
    """Return 1 if all of an answer's tokens are the likeliest, else 0; or the share that is."""
    pairs = zip(scores.logprobs, scores.tops, strict=True)
    likeliest = [logprob >= top[0][1] for logprob, top in pairs]
    return sum(likeliest) / len(likeliest) if by_token else float(all(likeliest))


def _answer(
    scores: TokenScores, question: Question, arm: Arm, repeat: int, context: Context
) -> Answer:
    return Answer(
        *(arm.name, repeat, context.name, question.name, context.task, context.length),
        None if question.depth is None else round(question.depth, _DIGITS),
        right=right_share(scores, by_token=question.by_token),
        tokens=len(question.answer),
        logprobs=tuple(round(logprob, _DIGITS) for logprob in scores.logprobs),
        trace=round(sum(p for top in scores.tops for _, p in top), _DIGITS),
    )


def _check_alike(servers: Mapping[str, Client]) -> None:
    """Refuse servers that differ in more than the pattern."""
    facts_of = {name: facts(client.server_info(), client.name) for name, client in servers.items()}
    (first, first_facts), *rest = facts_of.items()
    for name, other_facts in rest:
        differing = [
            f"{fact} ({' and '.join(repr(value) for value in values)})"
            for fact, values in alike({first: first_facts, name: other_facts}).items()
        ]
        if differing:
            raise QualityError(
                f"the servers of {first} and {name} differ in more than the pattern: "
                f"{'; '.join(differing)}. Start both with the same checkpoint and the same flags "
                "but --indexcache-pattern."
            )
