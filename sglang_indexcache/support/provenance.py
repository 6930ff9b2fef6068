"""Where a search's numbers come from: which weights, which data, which software."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sglang_indexcache import __version__
from sglang_indexcache.errors import SearchError

_SAMPLES, _SAMPLE_BYTES = 16, 1 << 20
_PACKAGES = ("sglang", "torch", "transformers")


def checkpoint_digest(folder: Path) -> str:
    """SHA-256 that tells checkpoints apart without reading hundreds of gigabytes.

    Covers config.json and of each .safetensors file its name, its size and 16 evenly spaced
    blocks of 1 MiB (all of a smaller file).

    Raises:
        SearchError: the folder has no config.json or no .safetensors file.
    """
    config, weights = folder / "config.json", sorted(folder.glob("*.safetensors"))
    if not config.exists() or not weights:
        raise SearchError(f"{folder} is not a checkpoint: it needs config.json and *.safetensors")
    content = hashlib.sha256(config.read_bytes())
    for path in weights:
        size = path.stat().st_size
        content.update(f"{path.name}:{size}\n".encode())
        for block in _blocks(path, size):
            content.update(block)
    return content.hexdigest()


def _blocks(path: Path, size: int) -> Iterable[bytes]:
    with path.open("rb") as file:
        if size <= _SAMPLES * _SAMPLE_BYTES:
            yield file.read()
            return
        for number in range(_SAMPLES):
            file.seek(number * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            yield file.read(_SAMPLE_BYTES)


def versions() -> dict[str, str]:
    """Versions of everything that can change a loss."""
    found = {"sglang-indexcache": __version__, "python": ".".join(map(str, sys.version_info[:3]))}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
