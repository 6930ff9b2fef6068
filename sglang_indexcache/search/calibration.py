"""Calibration data: documents in, token sequences of one length out, the same ones every time.

The paper's "calibration set": B mini-batches on which every candidate pattern is evaluated.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_indexcache.errors import SearchError
from sglang_indexcache.support.text import machine_text

DEFAULT_DATA = "machine"
"""Instead of a path: the Python standard library's sources, which every machine has."""

_TEXT_FIELDS = ("text", "content", "prompt")


@dataclass(frozen=True)
class Calibration:
    """Token sequences, cut into batches.

    Attributes:
        sequences: each ``[context]`` token ids.
        per_batch: sequences in a batch.
        source: where the text came from, in words.
        uncounted: predictions at the start of each sequence that no loss counts. Their queries see
            no more tokens than they may select, so a pattern cannot change them.
    """

    sequences: tuple[tuple[int, ...], ...]
    per_batch: int
    source: str
    uncounted: int = 0

    @property
    def context(self) -> int:
        """Tokens in a sequence."""
        return len(self.sequences[0])

    @property
    def batches(self) -> list[tuple[tuple[int, ...], ...]]:
        """The sequences of each batch."""
        starts = range(0, len(self.sequences), self.per_batch)
        return [self.sequences[i : i + self.per_batch] for i in starts]

    @property
    def batch_tokens(self) -> tuple[int, ...]:
        """Tokens of each batch."""
        return tuple(sum(map(len, batch)) for batch in self.batches)

    @property
    def digest(self) -> str:
        """SHA-256 over every token and the batching: equal if and only if the data is."""
        content = hashlib.sha256(f"{self.per_batch}\n".encode())
        for sequence in self.sequences:
            content.update((",".join(map(str, sequence)) + "\n").encode())
        return content.hexdigest()


@dataclass(frozen=True)
class Split:
    """What is searched on, and what the answer is checked on."""

    calibration: Calibration
    held_out: Calibration


def prepare(
    source: str,
    encode: Callable[[str], list[int]],
    separator: int,
    *,
    context: int,
    batches: int,
    per_batch: int = 1,
    held_out: int = 0,
    seed: int = 0,
) -> Split:
    """Read, tokenize, pack and split.

    Documents are joined by ``separator`` and cut into sequences of ``context`` tokens; a seeded
    shuffle deals them to the two parts, so neither part changes between runs or machines.

    Args:
        source: a .jsonl, .parquet or text file, a folder of them, or :data:`DEFAULT_DATA`.
        encode: the checkpoint's tokenizer, without special tokens.
        separator: token between documents (the end-of-text token).
        context: tokens in a sequence, at least 2.
        batches: calibration batches.
        per_batch: sequences in a batch.
        held_out: batches of the held-out part.
        seed: of the shuffle.

    Raises:
        SearchError: nothing to read, too little text, or text in another encoding.
    """
    if context < 2 or batches < 1 or per_batch < 1 or held_out < 0:
        raise SearchError(
            "calibration needs a context of at least 2 tokens and at least one sequence in at "
            f"least one batch; got context {context}, {batches} batches of {per_batch}"
        )
    wanted = (batches + held_out) * per_batch
    packed = list(_pack(_documents(source, wanted * context), encode, separator, context, wanted))
    if len(packed) < wanted:
        raise SearchError(
            f"{source} is too short: {batches + held_out} batches of {per_batch} sequences of "
            f"{context} tokens need {wanted * context} tokens, it gives {len(packed)} such "
            "sequences. Give more text, or ask for fewer batches or a shorter context."
        )
    random.Random(seed).shuffle(packed)
    cut = batches * per_batch
    return Split(
        Calibration(tuple(packed[:cut]), per_batch, source),
        Calibration(tuple(packed[cut:]), per_batch, f"{source} (held out)"),
    )


def _pack(
    documents: Iterable[str],
    encode: Callable[[str], list[int]],
    separator: int,
    context: int,
    wanted: int,
) -> Iterator[tuple[int, ...]]:
    """The first ``wanted`` sequences, or as many as there are."""
    left: list[int] = []
    made = 0
    for document in documents:
        left += [*encode(document), separator]
        while len(left) >= context and made < wanted:
            yield tuple(left[:context])
            left, made = left[context:], made + 1
        if made == wanted:
            return


def _documents(source: str, tokens: int) -> Iterator[str]:
    if source == DEFAULT_DATA:
        yield from machine_text(max(1_000_000, 16 * tokens))
        return
    path = Path(source)
    if not path.exists():
        raise SearchError(
            f"there is no calibration data at {source}. Give a .jsonl, .parquet or text file, a "
            f"folder of them, or {DEFAULT_DATA!r} for this machine's Python sources."
        )
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    found = False
    for file in files:
        for document in _read(file):
            if document.strip():
                found = True
                yield document
    if not found:
        raise SearchError(f"{source} contains no text")


def _read(path: Path) -> Iterator[str]:
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
        return
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SearchError(
            f"{path} is not UTF-8 (byte {error.start} is {error.object[error.start]:#04x}). "
            "Convert it first, for example with iconv."
        ) from error
    except OSError as error:
        raise SearchError(f"cannot read {path}: {error.strerror}") from error
    if path.suffix in (".jsonl", ".ndjson"):
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                yield _text_of(_parse(line, path, number), f"{path}, line {number}")
    else:
        yield text


def _parse(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise SearchError(f"{path}, line {number} is not JSON: {error}") from error


def _read_parquet(path: Path) -> Iterator[str]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise SearchError(f"reading {path} needs pyarrow: pip install pyarrow") from error
    try:
        for part in ParquetFile(path).iter_batches():
            for number, row in enumerate(part.to_pylist(), start=1):
                yield _text_of(row, f"{path}, row {number}")
    except ArrowException as error:
        raise SearchError(f"{path} is not a parquet file: {error}") from error


def _text_of(row: Any, where: str) -> str:
    """The text of one record: a string, a text field, or the contents of chat messages."""
    if isinstance(row, str):
        return row
    if isinstance(row, dict):
        for name in _TEXT_FIELDS:
            if isinstance(row.get(name), str):
                return str(row[name])
        messages = row.get("messages")
        if isinstance(messages, list) and all(isinstance(m, dict) for m in messages):
            return "\n".join(str(message.get("content", "")) for message in messages)
    fields = ", ".join(_TEXT_FIELDS)
    raise SearchError(f"{where} has no text: expected a string, one of {fields}, or messages")
