"""Held-out documents of the training tasks as JSONL: calibration data for a pattern search."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer

from sglang_indexcache.training.build import read_config
from sglang_indexcache.training.data.batches import TEXT, Mixture
from sglang_indexcache.training.data.retrieval import TASKS, Words
from sglang_indexcache.training.data.text import TEXT_CHARACTERS, Text
from sglang_indexcache.training.evaluate import document


def write_documents(
    checkpoint: Path, output: Path, length: int, rows: int, seed: int = 0
) -> dict[str, int]:
    """Write ``rows`` documents of every task, in turn, one JSON object a line.

    Args:
        checkpoint: gives the tokenizer.
        output: a ``.jsonl`` file; replaced.
        length: tokens of each document, before its text is tokenised again.
        rows: documents of each task.
        seed: of the documents.

    Returns:
        Documents of each task.

    Raises:
        TrainingError: not a checkpoint, or a tokenizer without enough one-token words.
    """
    read_config(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = Text.of_machine(tokenizer, TEXT_CHARACTERS)
    mixture = Mixture(tokenizer, text, Words(tokenizer), {TEXT: 1.0}, [length], seed, held_out=True)
    tasks = (TEXT, *TASKS)
    with output.open("w", encoding="utf-8") as file:
        for row in range(rows):
            for task in tasks:
                ids = document(mixture, task, length, seed, row).ids
                file.write(json.dumps({"task": task, "text": tokenizer.decode(ids)}) + "\n")
    return dict.fromkeys(tasks, rows)
