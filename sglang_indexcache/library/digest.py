"""Digest of a checkpoint, which says for which weights a file was made. Standard library only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from sglang_indexcache.errors import CheckpointError

_WHOLE_BYTES, _SAMPLE_BYTES = 16 << 20, 4 << 10


def checkpoint_digest(folder: Path) -> str:
    """Compute a SHA-256 that tells checkpoints apart without reading them whole.

    Covers config.json and of each .safetensors file its name, its size, its header (every
    tensor's name, dtype, shape and place) and the 4 KiB in the middle of every tensor; all of a
    file of at most 16 MiB. So it tells trained weights from others of the same shapes, whichever
    tensors were trained. It misses a change within one tensor of a larger file that spares those
    4 KiB, such as a few edited rows; and the same weights in other files count as others.

    Raises:
        CheckpointError: the folder has no config.json or no .safetensors file, or one of these
            is damaged.
    """
    config, weights = folder / "config.json", sorted(folder.glob("*.safetensors"))
    if not config.exists() or not weights:
        raise CheckpointError(
            f"{folder} is not a checkpoint: it needs config.json and *.safetensors"
        )
    content = hashlib.sha256(config.read_bytes())
    for path in weights:
        size = path.stat().st_size
        content.update(f"{path.name}:{size}\n".encode())
        for block in _blocks(path, size):
            content.update(block)
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
    """Return where each tensor starts and ends behind a safetensors header, in that order."""
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        return sorted(tuple(tensor["data_offsets"]) for tensor in tensors.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a safetensors file; download it again") from error
