"""Digest of a checkpoint, by which a file records its weights. Standard library only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from sglang_indexcache.errors import CheckpointError

_WHOLE_BYTES, _SAMPLE_BYTES = 16 << 20, 4 << 10


def checkpoint_digest(folder: Path) -> str:
    """Compute a SHA-256 that tells checkpoints apart without reading them whole.

    It covers config.json and, for each .safetensors file, the name, the size, the header (every
    tensor's name, dtype, shape and place) and the middle 4 KiB of every tensor; a file of at most
    16 MiB is read whole. So it distinguishes trained weights from others of the same shapes,
    whichever tensors were trained. It misses a change in a larger file that spares the middle 4 KiB
    of its tensor, such as a few edited rows. The same weights split into other files have another
    digest.

    Raises:
        CheckpointError: the folder has no config.json or no .safetensors file, or one of these
            is damaged or cannot be read.
    """
    config, weights = folder / "config.json", sorted(folder.glob("*.safetensors"))
    if not config.exists() or not weights:
        raise CheckpointError(
            f"{folder} is not a checkpoint: it needs config.json and *.safetensors"
        )
    try:
        content = hashlib.sha256(config.read_bytes())
        for path in weights:
            size = path.stat().st_size
            content.update(f"{path.name}:{size}\n".encode())
            for block in _blocks(path, size):
                content.update(block)
    except OSError as error:  # a dangling link, another user's file
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from error
    return content.hexdigest()


def _blocks(path: Path, size: int) -> Iterable[bytes]:
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            yield file.read()
            return
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, size))
        yield header
        for start, end in _tensor_bytes(path, header):
            file.seek(8 + length + max(start, (start + end - _SAMPLE_BYTES) // 2))
            yield file.read(min(_SAMPLE_BYTES, end - start))


def _tensor_bytes(path: Path, header: bytes) -> list[tuple[int, int]]:
    """Return each tensor's start and end offset behind a safetensors header, in file order."""
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        return sorted(tuple(tensor["data_offsets"]) for tensor in tensors.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a safetensors file; download it again") from error
