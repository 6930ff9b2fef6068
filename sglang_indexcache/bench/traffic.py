"""What is sent: prompts of exact lengths, and production-shaped sessions of several turns."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_indexcache.bench.results import Strict
from sglang_indexcache.errors import BenchError

P50, P90 = 55_000, 280_000
"""Tokens of agent traffic's context: its median and its 90th percentile."""
_SIGMA = math.log(P90 / P50) / 1.2815515655446004  # the normal distribution's 90th percentile
TEMPLATE_TOKENS = 16
"""Room left for what a chat template adds to a turn."""
_LEAST_TURN = 32
_WORD = re.compile(r" [a-z]{2,}")
_LOWEST = 10
"""Token ids below are often special."""
_UNUSED_SHARE = 0.1
"""So are those at the vocabulary's end."""


def random_prompts(count: int, length: int, vocab_size: int, *seed: object) -> list[list[int]]:
    """``count`` prompts of ``length`` random token ids.

    They are sent as ids, so no tokenizer can change their length, and differ from the first token
    on, so that not even a page of two of them is the same.

    Args:
        count: how many.
        length: tokens of each.
        vocab_size: of the model.
        seed: anything; the same seed gives the same prompts.

    Raises:
        BenchError: no tokens to draw, or more prompts than first tokens.
    """
    stop = int(vocab_size * (1 - _UNUSED_SHARE))
    if length < 1 or count > stop - _LOWEST:
        raise BenchError(f"cannot make {count} different prompts of {length} tokens")
    source = random.Random("/".join(map(str, seed)))
    firsts = source.sample(range(_LOWEST, stop), count)
    return [[first, *source.choices(range(_LOWEST, stop), k=length - 1)] for first in firsts]


class Mix(Strict):
    """What to send.

    Attributes:
        sessions: conversations.
        turns: of a conversation, on average; their number is geometric.
        limit: tokens that the longest may have, answers included.
        system: tokens of the system prompt, which all share.
        answer: tokens generated in a turn.
        concurrency: conversations at once.
        seed: of everything.
    """

    sessions: int
    turns: float = 3.0
    limit: int
    system: int = 1024
    answer: int = 32
    concurrency: int = 4
    seed: int = 0

    def check(self) -> None:
        """Raise BenchError on a mix that has no sessions or no room for one."""
        least = self.system + 2 * (_LEAST_TURN + self.answer + TEMPLATE_TOKENS)
        if self.sessions < 1 or self.turns < 1 or self.concurrency < 1 or self.answer < 2:
            raise BenchError("give sessions, turns, concurrency of at least 1 and answers of 2")
        if self.limit < least:
            raise BenchError(f"a limit of {self.limit} tokens has no room for two turns ({least})")


@dataclass(frozen=True)
class Session:
    """One conversation.

    Attributes:
        turns: new tokens of each user message, the system prompt not counted.
    """

    turns: tuple[int, ...]

    def total(self, mix: Mix) -> int:
        """Tokens at its end, at most."""
        return mix.system + sum(self.turns) + len(self.turns) * (mix.answer + TEMPLATE_TOKENS)


def sessions(mix: Mix) -> list[Session]:
    """Log-normal totals with the 90th percentile at the limit and P50 : P90 as in :data:`P50`.

    What the limit cuts off is a tenth of the sessions. The first turn brings about half of the
    context, as when a user opens with files; the others share the rest.

    Raises:
        BenchError: see :meth:`Mix.check`.
    """
    mix.check()
    source = random.Random(f"traffic/{mix.seed}")
    median = mix.limit * P50 / P90
    found = []
    for _ in range(mix.sessions):
        wanted = min(mix.limit, median * math.exp(_SIGMA * source.gauss()))
        most = int((wanted - mix.system) // (_LEAST_TURN + mix.answer + TEMPLATE_TOKENS))
        count = max(1, min(_geometric(source, mix.turns), most))
        room = int(wanted) - mix.system - count * (mix.answer + TEMPLATE_TOKENS)
        found.append(Session(_split(max(_LEAST_TURN * count, room), count, source)))
    return found


def _geometric(source: random.Random, mean: float) -> int:
    count = 1
    while source.random() > 1 / mean:
        count += 1
    return count


def _split(total: int, count: int, source: random.Random) -> tuple[int, ...]:
    """``total`` in ``count`` parts of at least :data:`_LEAST_TURN`, the first about half."""
    if count == 1:
        return (total,)
    spare = total - _LEAST_TURN * count
    weights = [float(count - 1), *(2 * source.random() for _ in range(count - 1))]
    parts = [_LEAST_TURN + int(spare * weight / sum(weights)) for weight in weights]
    parts[0] += total - sum(parts)
    return tuple(parts)


class Words:
    """Text whose number of tokens is known before it is tokenized.

    Drawn from the vocabulary's entries that are one word behind a space: byte-level BPE splits
    text before such a word, so the tokens of a concatenation are the words that went in.

    Args:
        tokenizer: a transformers tokenizer.

    Raises:
        BenchError: a tokenizer that works otherwise.
    """

    def __init__(self, tokenizer: Any) -> None:
        decoded = ((tokenizer.decode([number]), number) for number in range(tokenizer.vocab_size))
        self._words = [text for text, _ in decoded if _WORD.fullmatch(text)]
        sample = self.text(500, random.Random(0)) if self._words else ""
        if not sample or len(tokenizer(sample, add_special_tokens=False)["input_ids"]) != 500:
            raise BenchError(
                "this tokenizer does not keep words apart, so prompts of exact length cannot be "
                "written with it"
            )

    @classmethod
    def of(cls, model: Path) -> Words:
        """With the tokenizer of a checkpoint folder."""
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(model))

    def text(self, tokens: int, source: random.Random) -> str:
        """``tokens`` tokens."""
        return "".join(source.choices(self._words, k=tokens))


def trace(mix: Mix, conversations: Sequence[Session], words: Words, salt: str) -> dict[str, Any]:
    """What ``sglang.benchmark.serving --dataset-name agentic-trace`` reads.

    Args:
        mix: for the system prompt and the seed.
        conversations: their lengths.
        words: to write the messages with.
        salt: another salt gives other texts of the same lengths.
    """
    source = random.Random(f"traffic/{mix.seed}/{salt}")
    system = {"role": "system", "content": words.text(mix.system, source)}
    found = []
    for session in conversations:
        turns = []
        for number, tokens in enumerate(session.turns):
            user = {"role": "user", "content": words.text(tokens, source)}
            turns.append({"messages": [user] if number else [system, user]})
        turns[0]["prompt_tokens"] = mix.system + session.turns[0]  # type: ignore[assignment]
        found.append(turns)
    return {"metadata": {"seed": mix.seed}, "conversations": found}
