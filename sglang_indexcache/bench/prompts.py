"""Prompts of exact lengths."""

from __future__ import annotations

import random

from sglang_indexcache.errors import BenchError

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
