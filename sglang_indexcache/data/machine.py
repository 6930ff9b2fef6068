"""Text that every machine with Python has: the standard library's sources, tokenised."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from sglang_indexcache.errors import DataError
from sglang_indexcache.support.text import machine_text

HELD_OUT_EVERY = 10
"""Each tenth file, in name order, is kept for validation."""

TEXT_CHARACTERS = 4_000_000
"""How much of it the reports read."""

Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class MachineText:
    """Tokenised source files.

    Attributes:
        train: the training files' tokens, concatenated, an end token after each.
        held_out: likewise, files that training never sees.
    """

    train: Tokens
    held_out: Tokens

    @classmethod
    def read(cls, tokenizer: PreTrainedTokenizerBase, limit: int) -> MachineText:
        """Tokenise the standard library's top-level modules.

        Args:
            tokenizer: with an end-of-sequence token.
            limit: characters, at most.

        Raises:
            DataError: if too little text was found to hold any out.
        """
        files = list(machine_text(limit))
        if len(files) < HELD_OUT_EVERY:
            raise DataError(
                f"found {len(files)} modules of the standard library; it takes at least "
                f"{HELD_OUT_EVERY} to hold some out. Give a larger limit."
            )
        ids = [[*row, tokenizer.eos_token_id] for row in tokenizer(files)["input_ids"]]
        held_out = ids[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        train = [row for i, row in enumerate(ids) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
        return cls(_join(train), _join(held_out))

    def part(self, held_out: bool) -> Tokens:
        """The training or the held-out tokens."""
        return self.held_out if held_out else self.train


def window(tokens: Tokens, length: int, draw: random.Random) -> list[int]:
    """``length`` consecutive tokens from a random place."""
    start = draw.randrange(len(tokens) - length)
    found: list[int] = tokens[start : start + length].tolist()
    return found


def _join(rows: list[list[int]]) -> Tokens:
    return np.concatenate([np.asarray(row, dtype=np.int32) for row in rows])
