"""``indexcache heal merge``: write an adapter and its base as one standard checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

from sglang_indexcache.checkpoint import SHARING_KEYS, read_config
from sglang_indexcache.errors import TrainingError
from sglang_indexcache.lab.runs.identity import locked
from sglang_indexcache.library.writing import replacing, write_whole, writing
from sglang_indexcache.serving.adapters.folder import Adapter, indexer_layer
from sglang_indexcache.serving.adapters.weights import check_form, like_stored
from sglang_indexcache.serving.adapters.writing import write_tensors

_INDEX = "model.safetensors.index.json"


def merge(folder: Path, base: Path, output: Path, say: Callable[[str], None] = print) -> None:
    """Write the base with the adapter's indexers and pattern, or continue an interrupted merge.

    ``indexer_types`` in config.json holds the pattern, the indexers of F layers are the adapter's
    in the base's storage form, and the indexers of S layers are left out. Every other tensor,
    including MTP layers, is the base's bit for bit; a file without indexers is a hard link where
    the disk allows it.

    Raises:
        IndexCacheError: the adapter is for another checkpoint, or its form cannot be written.
        TrainingError: ``output`` is not empty, or another command merges into it.
        OutputError: the disk is full; afterwards the same command continues.
    """
    if output.exists() and any(output.iterdir()):
        raise TrainingError(f"{output} is not empty; write the checkpoint to a new folder")
    adapter = Adapter.read(folder)
    adapter.check(base)
    check_form(base, adapter.names())
    new = like_stored(base, adapter.tensors())
    # The folder's name identifies adapter and base, so files from an interrupted run can be kept.
    part = output.with_name(f".{output.name}.{adapter.digest[:8]}{adapter.base.digest[:8]}.part")
    lock = part.with_name(f"{part.name}.lock")
    with locked(lock, "merge", TrainingError):
        _write(base, adapter, new, part, say)
        if output.exists():
            output.rmdir()
        part.rename(output)
        lock.unlink()


def _write(
    base: Path,
    adapter: Adapter,
    new: dict[str, torch.Tensor],
    part: Path,
    say: Callable[[str], None],
) -> None:
    """Write every file that ``part`` lacks, ``new`` in place of the base's tensors."""
    part.mkdir(parents=True, exist_ok=True)
    shards = sorted(base.glob("*.safetensors"))
    for number, path in enumerate(shards, 1):
        say(f"{number} of {len(shards)}: {path.name}")
        if not (part / path.name).exists():
            _write_shard(path, part / path.name, new, adapter)
    _copy_others(base, part)
    _write_config(base, part, adapter)
    if (base / _INDEX).exists():
        _write_index(part)


def _write_shard(path: Path, target: Path, new: dict[str, torch.Tensor], adapter: Adapter) -> None:
    with safe_open(path, "pt") as file:
        names = list(file.keys())
        names_to_write = [
            name for name in names if indexer_layer(name) not in adapter.pattern.shared_layers
        ]
        if names_to_write == names and new.keys().isdisjoint(names):
            _link(path, target)
        elif names_to_write:
            tensors = {
                name: new[name] if name in new else file.get_tensor(name) for name in names_to_write
            }
            write_tensors(tensors, target)


def _link(path: Path, target: Path) -> None:
    with replacing(target) as part:
        part.unlink(missing_ok=True)
        try:
            os.link(path.resolve(), part)
        except OSError:  # on another disk, or on one without hard links
            shutil.copyfile(path, part)


def _copy_others(base: Path, target: Path) -> None:
    """Copy everything except weights and hidden files: tokenizer, code, licence."""
    for path in base.iterdir():
        if path.name.startswith(".") or path.suffix == ".safetensors":
            continue
        with writing(target / path.name, shutil.Error):  # raised by copytree
            if path.is_dir():
                shutil.copytree(path, target / path.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(path, target / path.name)


def _write_config(base: Path, target: Path, adapter: Adapter) -> None:
    config = {key: value for key, value in read_config(base).items() if key not in SHARING_KEYS}
    config["indexer_types"] = adapter.pattern.to_indexer_types()
    write_whole(target / "config.json", json.dumps(config, indent=2) + "\n")


def _write_index(folder: Path) -> None:
    """Write the index of the tensors in each file."""
    places, size = {}, 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                places[name] = path.name
                size += file.get_tensor(name).nbytes
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    write_whole(folder / _INDEX, json.dumps(index, indent=2) + "\n")
