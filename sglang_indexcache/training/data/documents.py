"""Held-out documents of the training tasks as JSONL: calibration data for a pattern search."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer

from sglang_indexcache.checkpoint import read_config
from sglang_indexcache.support.files import write_whole
from sglang_indexcache.training.data.batches import TEXT, Mixture
from sglang_indexcache.training.data.retrieval import TASKS, Words
from sglang_indexcache.training.data.text import TEXT_CHARACTERS, Text
from sglang_indexcache.training.evaluate import document

FILE = "documents.jsonl"


def write_documents(
    checkpoint: Path, folder: Path, length: int, rows: int, seed: int = 0
) -> tuple[Path, dict[str, int]]:
    """Write ``rows`` documents of every task, in turn, one JSON object a line.

    Args:
        checkpoint: gives the tokenizer.
        folder: where :data:`FILE` goes; created if missing.
        length: tokens of each document, before its text is tokenised again.
        rows: documents of each task.
        seed: of the documents.

    Returns:
        The file, and how many documents of each task it holds.

    Raises:
        CheckpointError: not a checkpoint.
        TrainingError: a tokenizer without enough one-token words.
    """
    read_config(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = Text.of_machine(tokenizer, TEXT_CHARACTERS)
    mixture = Mixture(tokenizer, text, Words(tokenizer), {TEXT: 1.0}, [length], seed, held_out=True)
    tasks = (TEXT, *TASKS)
    lines = []
    for row in range(rows):
        for task in tasks:
            ids = document(mixture, task, length, seed, row).ids
            lines.append(json.dumps({"task": task, "text": tokenizer.decode(ids)}) + "\n")
    path = folder / FILE
    write_whole(path, "".join(lines))
    return path, dict.fromkeys(tasks, rows)
