"""Text that every machine with Python has, and a tokenizer trained on it."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_indexcache.errors import SettingsError

TOKENIZER_TEXT_BYTES = 4_000_000
"""How much of the Python standard library the tokenizer is trained on."""

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_END, _PAD = "<|endoftext|>", "<|pad|>"
_SPECIAL_TOKENS = (_END, _PAD, "<|system|>", "<|user|>", "<|assistant|>")


def machine_text(limit: int) -> Iterator[str]:
    """The standard library's sources, file by file in name order.

    Args:
        limit: bytes, at most.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    left = limit
    for path in sorted(folder.glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")[:left]
        left -= len(text)
        yield text
        if left <= 0:
            return


def make_tokenizer(vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer on the machine's text.

    Returns:
        A ``PreTrainedTokenizerFast`` with end and padding tokens and a chat template.

    Raises:
        SettingsError: a vocabulary smaller than the bytes and the special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    smallest = 256 + len(_SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise SettingsError(f"the vocabulary needs at least {smallest} entries, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(machine_text(TOKENIZER_TEXT_BYTES), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END,
        pad_token=_PAD,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast
