"""Tensors as they lie in a checkpoint's files, and what a checkpoint made from it takes over.

A model in memory knows less than the files it came from: transformers loads everything in one
dtype and leaves the MTP layers out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sglang_indexcache.errors import TrainingError
from sglang_indexcache.support.files import replacing, write_whole

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Those that a weight can be trained in, as safetensors writes them."""


def check_trainable_dtypes(folder: Path) -> None:
    """Raise before weights are loaded that no gradient can change.

    Raises:
        TrainingError: quantised weights.
    """
    for name, (path, kind) in stored(folder).items():
        if name.endswith("weight") and kind not in DTYPES:
            raise TrainingError(
                f"{path} holds {name} as {kind}, which cannot be trained. Dequantise the "
                "checkpoint to bfloat16 first."
            )


def take_over(
    base: Path, folder: Path, left_out: Callable[[str], bool], dtype: torch.dtype | None
) -> None:
    """Make a written checkpoint agree with the one it came from in what training did not change.

    Args:
        base: the checkpoint it came from.
        folder: the new one. Every tensor gets the dtype that it has in ``base``, and tensors of
            ``base`` that it lacks are added as they are.
        left_out: names of ``base``'s tensors that it lacks on purpose.
        dtype: of tensors that ``base`` lacks; None changes no dtype at all.
    """
    theirs, ours = stored(base), stored(folder)
    if dtype is not None:
        kinds = {name: DTYPES[kind] for name, (_, kind) in theirs.items() if kind in DTYPES}
        for path in {path for path, _ in ours.values()}:
            tensors = load_file(path)
            _write({name: t.to(kinds.get(name, dtype)) for name, t in tensors.items()}, path)
    missing: dict[Path, list[str]] = {}
    for name, (path, _) in theirs.items():
        if name not in ours and not left_out(name):
            missing.setdefault(path, []).append(name)
    for path, names in missing.items():
        with safe_open(path, "pt") as file:
            found = {name: file.get_tensor(name) for name in names}
        _write(found, folder / f"model-of-base-{path.name}")
    if missing:
        _number(folder)


def _number(folder: Path) -> None:
    """Name the files as shards of one checkpoint, and write the index that lists them."""
    files = _files(folder)
    places: dict[str, str] = {}
    size = 0
    for number, path in enumerate(files, 1):
        shard = folder / f"model-{number:05d}-of-{len(files):05d}.safetensors.new"
        with safe_open(path, "pt") as file:
            places |= dict.fromkeys(file.keys(), shard.name.removesuffix(".new"))
        size += path.stat().st_size
        path.rename(shard)
    for path in folder.glob("*.safetensors.new"):  # a new name may have been an old one
        path.rename(path.with_suffix(""))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    write_whole(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def stored(folder: Path) -> dict[str, tuple[Path, str]]:
    """Every tensor's file, and its dtype as safetensors writes it; no tensor is read."""
    found = {}
    for path in _files(folder):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                found[name] = path, file.get_slice(name).get_dtype()
    return found


def _write(tensors: dict[str, torch.Tensor], path: Path) -> None:
    with replacing(path) as part:
        save_file(tensors, part, metadata={"format": "pt"})
