"""Writing of an adapter, in one step, so that no reader sees half of it.

A server only reads adapters (``folder.py``).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from sglang_indexcache.checkpoint import Checkpoint, fp8_blocks
from sglang_indexcache.errors import CheckpointError
from sglang_indexcache.library.digest import checkpoint_digest
from sglang_indexcache.library.writing import replacing, write_whole
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.adapters.folder import (
    ADAPTER_FILE,
    WEIGHTS_FILE,
    Adapter,
    Base,
    Document,
    check_tensors,
    file_digest,
)

if TYPE_CHECKING:
    from torch import Tensor

_SHAPE_FIELDS = ("hidden_size", "q_lora_rank", "index_n_heads", "index_head_dim")


def write_adapter(
    folder: Path,
    *,
    pattern: Pattern,
    checkpoint: Path,
    tensors: Mapping[str, Tensor],
    record: Mapping[str, Any],
) -> Adapter:
    """Write an adapter in one step, so that no reader sees half of it.

    Args:
        folder: is created; an adapter in it is replaced.
        checkpoint: the folder of the base checkpoint, which is not changed.
        tensors: every indexer tensor of every F layer by the checkpoint's names, such as
            ``model.layers.3.self_attn.indexer.wq_b.weight``, not quantised, and no others.
        record: further facts to store, of types that YAML can hold.

    Raises:
        CheckpointError: tensors are missing, superfluous, of a wrong shape or not finite, or the
            folder holds something else.
        OutputError: the adapter cannot be written.
        PatternError: the pattern does not fit the checkpoint.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / ADAPTER_FILE).exists():
        raise CheckpointError(f"{folder} holds something else; write the adapter to a new folder")
    base = _base(checkpoint, pattern)
    if broken := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise CheckpointError(f"{broken[0]} has values that are not finite; do not serve it")
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    weights = part / WEIGHTS_FILE
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_tensors(plain, weights)
    check_tensors(weights, pattern, base, "the new adapter")
    document = Document(
        format=1,
        pattern=str(pattern),
        base=base,
        weights=file_digest(weights),
        record=dict(record),
    )
    text = yaml.safe_dump(document.model_dump(), sort_keys=False, width=100)
    write_whole(part / ADAPTER_FILE, text)
    _put_in_place(part, folder)
    return Adapter.read(folder)


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Replace a safetensors file in one step, or raise OutputError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with replacing(path, SafetensorError) as part:
        save_file(tensors, part, metadata={"format": "pt"})


def _base(folder: Path, pattern: Pattern) -> Base:
    checkpoint = Checkpoint.read(folder)
    checkpoint.check_trained(str(folder))
    fp8_blocks(folder)
    pattern.check_checkpoint(checkpoint.own)
    missing = [name for name in _SHAPE_FIELDS if name not in checkpoint.shape]
    if missing:
        raise CheckpointError(
            f"the config.json of {folder} has no {missing[0]}, from which an indexer's shapes "
            "follow. Give the config.json that belongs to the weights."
        )
    return Base(
        name=folder.resolve().name,
        architecture=checkpoint.architecture,
        digest=checkpoint_digest(folder),
        shape={name: checkpoint.shape[name] for name in _SHAPE_FIELDS},
    )


def _put_in_place(part: Path, folder: Path) -> None:
    """Rename a complete folder to its final path, and remove a replaced folder last."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
