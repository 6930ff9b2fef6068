"""Calibration data: documents in, token sequences of one length out, the same ones every time.

The paper's "calibration set": B mini-batches on which every candidate pattern is evaluated.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_indexcache.errors import SearchError
from sglang_indexcache.support.text import machine_text

DEFAULT_DATA = "machine"
"""Instead of a path: the Python standard library's sources, which every machine has."""

HELD_OUT_SHARE = 4
"""One sequence in so many is never searched on."""

_TEXT_FIELDS = ("text", "content", "prompt")


@dataclass(frozen=True)
class Calibration:
    """Token sequences, cut into batches.

    Attributes:
        sequences: each ``[context]`` token ids.
        per_batch: sequences in a batch.
        source: where the text came from, in words.
        held_out: batches at the end that a search must not search on.
        uncounted: predictions at the start of each sequence that no loss counts. Their queries see
            no more tokens than they may select, so a pattern cannot change them.
    """

    sequences: tuple[tuple[int, ...], ...]
    per_batch: int
    source: str
    held_out: int = 0
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

    Documents are joined by ``separator`` and cut into sequences of ``context`` tokens. Whether one
    is held out says a digest of its tokens (see :func:`is_held_out`); of each part the first that
    are needed are taken and shuffled. So neither part changes between runs or machines.

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
    wanted = {False: batches * per_batch, True: held_out * per_batch}
    parts: dict[bool, list[tuple[int, ...]]] = {False: [], True: []}
    enough = 2 * (wanted[False] + HELD_OUT_SHARE * wanted[True])
    for sequence in _pack(_documents(source, enough * context), encode, separator, context):
        part = is_held_out(sequence)
        if len(parts[part]) < wanted[part]:
            parts[part].append(sequence)
        if all(len(parts[part]) == wanted[part] for part in parts):
            break
    else:
        raise SearchError(
            f"{source} is too short: of {wanted[False]} sequences of {context} tokens to search on "
            f"it gives {len(parts[False])}, and of {wanted[True]} to hold out {len(parts[True])}. "
            "Give more text, or ask for fewer batches or a shorter context."
        )
    for chosen in parts.values():
        random.Random(seed).shuffle(chosen)
    return Split(
        Calibration(tuple(parts[False]), per_batch, source),
        Calibration(tuple(parts[True]), per_batch, f"{source} (held out)"),
    )


def is_held_out(sequence: Sequence[int]) -> bool:
    """Whether this ``[context]`` sequence belongs to the held-out part: one in four does.

    Its own tokens say it, so no command can mix the two, whatever its batch counts and its seed.
    """
    digest = hashlib.sha256(",".join(map(str, sequence)).encode()).digest()
    return digest[0] % HELD_OUT_SHARE == 0


def _pack(
    documents: Iterable[str], encode: Callable[[str], list[int]], separator: int, context: int
) -> Iterator[tuple[int, ...]]:
    """Sequences, as many as the documents give."""
    left: list[int] = []
    for document in documents:
        left += [*encode(document), separator]
        while len(left) >= context:
            yield tuple(left[:context])
            left = left[context:]


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
