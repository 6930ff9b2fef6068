"""Held-out documents of the tasks, the same on any process count: scored, or written down."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sglang_indexcache.checkpoint import read_config
from sglang_indexcache.errors import TrainingError
from sglang_indexcache.heal.data.batches import TEXT, Batch, Mixture
from sglang_indexcache.heal.data.files import FILES
from sglang_indexcache.heal.data.retrieval import TASKS, Document, TaskWords
from sglang_indexcache.heal.data.text import TEXT_CHARACTERS, Text
from sglang_indexcache.heal.model import DistilledModel, Losses
from sglang_indexcache.heal.sharing import Stage
from sglang_indexcache.support.files import write_whole

SCORED_BY_LOSS = (TEXT, FILES)
"""Tasks without questions; what may be learned of them is scored."""

DOCUMENTS = "documents.jsonl"
_ATTEMPTS = 500
"""To draw one document. For 192 of 512 tokens, the demo's tokenizer needed 19 at most."""


@dataclass(frozen=True)
class Score:
    """One task's result.

    Attributes:
        task: "text", "files" or a retrieval task.
        loss: nats per scored token: all tokens of text, what may be learned of files, the answers
            of a retrieval task.
        accuracy: share of scored tokens whose most probable prediction is right.
        tokens: scored tokens.
        per_row: accuracy (text, files: loss) of each row, for paired statistics.
        loss_per_row: loss of each row.
    """

    task: str
    loss: float
    accuracy: float
    tokens: int
    per_row: tuple[float, ...]
    loss_per_row: tuple[float, ...]


@torch.no_grad()
def evaluate(
    model: DistilledModel,
    mixture: Mixture,
    tasks: list[str],
    rows: int,
    length: int,
    stage: Stage = Stage.SPARSE,
    seed: int = 0,
    batch_rows: int = 4,
) -> list[Score]:
    """Score every task.

    Args:
        model: left in the mode it was in.
        mixture: gives words and held-out text.
        tasks: of ``TASKS``, and "text".
        rows: documents of each task.
        length: tokens of each document.
        stage: attention over everything (``DENSE``) or over the selection (``SPARSE``).
        seed: of the documents.
        batch_rows: rows of one forward pass.
    """
    was_training = model.training
    model.eval()
    try:
        return [
            _score(model, task, _batches(mixture, task, rows, length, seed, batch_rows), stage)
            for task in tasks
        ]
    finally:
        model.train(was_training)


def document(
    mixture: Mixture, task: str, length: int, seed: int, row: int, attempt: int = 0
) -> Document:
    """Evaluation document ``row`` of a task, at most ``length`` tokens of held-out material.

    Each ``attempt`` is another document.
    """
    draw = random.Random(
        f"evaluation/{seed}/{task}/{length}/{row}" + (f"/{attempt}" if attempt else "")
    )
    if task == TEXT:
        return mixture.documents(TEXT, length, draw)[0]
    return TASKS[task](mixture.words, mixture.text.part(mixture.held_out), length, draw)


def write_documents(
    checkpoint: Path, folder: Path, length: int, rows: int, seed: int = 0
) -> tuple[Path, dict[str, int]]:
    """Write ``rows`` documents of every task, in turn, one JSON object a line.

    Each has "task", "text" and, of a retrieval task, "answers": the first character of each answer
    in the text, and the one after its last.

    Args:
        checkpoint: gives the tokenizer.
        folder: where :data:`DOCUMENTS` goes; created if missing.
        length: tokens of each document, also when its text is tokenised again.
        rows: documents of each task.
        seed: of the documents.

    Returns:
        The file, and how many documents of each task it holds.

    Raises:
        CheckpointError: not a checkpoint.
        TrainingError: a tokenizer without enough one-token words, or one that does not find the
            tokens of a document again in its text.
    """
    read_config(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = Text.of_machine(tokenizer, TEXT_CHARACTERS)
    mixture = Mixture(
        tokenizer, text, TaskWords(tokenizer), {TEXT: 1.0}, [length], seed, held_out=True
    )
    tasks = (TEXT, *TASKS)
    lines = []
    for row in range(rows):
        for task in tasks:
            line = {"task": task, **_written(mixture, task, length, seed, row)}
            lines.append(json.dumps(line) + "\n")
    path = folder / DOCUMENTS
    write_whole(path, "".join(lines))
    return path, dict.fromkeys(tasks, rows)


def _written(mixture: Mixture, task: str, length: int, seed: int, row: int) -> dict[str, Any]:
    """The text of a document that has ``length`` tokens when it is read, and its answers.

    Where source text was cut, its characters can make other tokens than it was cut from. So
    documents of about this length are drawn until one comes out right.
    """
    size = length
    for attempt in range(_ATTEMPTS):
        drawn = document(mixture, task, size, seed, row, attempt)
        text, answers = _in_text(mixture.tokenizer, drawn)
        read = mixture.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ids, offsets = read["input_ids"], read["offset_mapping"]
        ends = {end: token for token, (_, end) in zip(ids, offsets, strict=True)}
        found = [ends.get(end) for _, end in answers]
        if len(ids) == length and found == [
            token for token, is_answer in zip(drawn.ids, drawn.answer, strict=True) if is_answer
        ]:
            return {"text": text, "answers": answers} if answers else {"text": text}
        size += (len(ids) < length) - (len(ids) > length)
    raise TrainingError(
        f"after {_ATTEMPTS} attempts no {task} document has {length} tokens when its text is read "
        "again. Try another --context or --seed."
    )


def _in_text(
    tokenizer: PreTrainedTokenizerBase, drawn: Document
) -> tuple[str, list[tuple[int, int]]]:
    """A document's text, and where in it its answers lie (each is one token)."""

    def written(count: int) -> str:
        text: str = tokenizer.decode(drawn.ids[:count], clean_up_tokenization_spaces=False)
        return text

    places = [i for i, is_answer in enumerate(drawn.answer) if is_answer]
    return written(len(drawn)), [(len(written(i)), len(written(i + 1))) for i in places]


def _batches(
    mixture: Mixture, task: str, rows: int, length: int, seed: int, batch_rows: int
) -> Iterator[Batch]:
    for start in range(0, rows, batch_rows):
        numbers = range(start, min(start + batch_rows, rows))
        documents = [_row(mixture, task, length, seed, row) for row in numbers]
        yield mixture.collate(documents, length)


def _row(mixture: Mixture, task: str, length: int, seed: int, row: int) -> list[Document]:
    """Evaluation row ``row``: a document, or a packed row of a user's files."""
    if task == FILES:
        return mixture.documents(FILES, length, random.Random(f"{seed}/{row}"))
    return [document(mixture, task, length, seed, row)]


def _score(model: DistilledModel, task: str, batches: Iterator[Batch], stage: Stage) -> Score:
    device = next(model.parameters()).device
    by_loss = task in SCORED_BY_LOSS
    losses: list[torch.Tensor] = []
    hits: list[torch.Tensor] = []
    for batch in batches:
        here = batch.to(device)
        found: Losses = model(here.ids, here.labels, here.documents, here.positions, stage)
        scored = here.labels[:, 1:] >= 0 if by_loss else here.answers[:, 1:]
        for row, wanted in enumerate(scored):
            losses.append(found.token_nats[row, :-1][wanted])
            hits.append(found.token_hits[row, :-1][wanted].float())
    rows = losses if by_loss else hits
    return Score(
        task=task,
        loss=float(torch.cat(losses).mean()),
        accuracy=float(torch.cat(hits).mean()),
        tokens=sum(len(row) for row in losses),
        per_row=tuple(float(row.mean()) for row in rows),
        loss_per_row=tuple(float(row.mean()) for row in losses),
    )
