"""A small tokenizer of this machine's text."""

from __future__ import annotations

from functools import cache
from tempfile import TemporaryDirectory

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.fixtures.models import make_tokenizer


@cache
def tokenizer(vocab_size: int = 700) -> PreTrainedTokenizerBase:
    with TemporaryDirectory() as folder:
        make_tokenizer(vocab_size).save_pretrained(folder)
        return AutoTokenizer.from_pretrained(folder)
