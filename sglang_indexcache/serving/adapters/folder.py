"""An adapter: a folder with the indexers that a pattern keeps, trained on a frozen model.

``adapter.yaml`` says which pattern and which checkpoint it is for and how it was made;
``indexers.safetensors`` holds every indexer tensor of every F layer under the checkpoint's own
names, in float32, bfloat16 or float16, and nothing else. If the checkpoint, or the engine that
serves it, stores an indexer quantised, the adapter's tensors are quantised the same way when they
replace it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import Field, ValidationError

from sglang_indexcache.checkpoint import Checkpoint, fp8_blocks
from sglang_indexcache.errors import CheckpointError, PatternError
from sglang_indexcache.library.digest import checkpoint_digest
from sglang_indexcache.library.files import Strict, parse_yaml
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.adapters.weights import tensors_in

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER_FILE = "adapter.yaml"
WEIGHTS_FILE = "indexers.safetensors"

_PLAIN = ("F32", "BF16", "F16")
"""Dtypes that an adapter may hold, by their safetensors names."""
_NAME = re.compile(r"model\.layers\.(\d+)\.self_attn\.indexer\.(.+)")


class Base(Strict):
    """The checkpoint that an adapter is for.

    ``name`` is the name of its folder, for people; ``digest``, of
    ``library.digest.checkpoint_digest``, identifies it. ``shape`` holds the config fields from
    which an indexer's shapes follow.
    """

    name: str
    architecture: str
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    shape: dict[str, int]


class Document(Strict):
    """Content of ``adapter.yaml``; ``weights`` is the SHA-256 of ``indexers.safetensors``."""

    format: Literal[1]
    pattern: str
    base: Base
    weights: str = Field(pattern=r"^[0-9a-f]{64}$")
    record: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class Adapter:
    """An adapter's folder, read and checked.

    ``digest`` is the SHA-256 of its weights; ``record`` describes in any form how it was made:
    data, losses, steps, versions.
    """

    folder: Path
    pattern: Pattern
    base: Base
    digest: str
    record: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Adapter:
        """Read and check an adapter; the whole weights file is read once, for its digest.

        Raises:
            CheckpointError: the folder is no adapter, a file is damaged, or an indexer is missing
                or has another shape than the model's.
            PatternError: its pattern is malformed.
        """
        document = _document(folder)
        pattern = Pattern(document.pattern)
        adapter = cls(folder, pattern, document.base, document.weights, document.record)
        if not adapter.weights_file.exists():
            raise CheckpointError(f"the adapter {folder} has no {WEIGHTS_FILE}. Copy it again.")
        if file_digest(adapter.weights_file) != adapter.digest:
            raise CheckpointError(
                f"{adapter.weights_file} is not the file that {ADAPTER_FILE} was written for: its "
                "SHA-256 differs, so it is damaged or was replaced. Copy or train the adapter "
                "again."
            )
        check_tensors(adapter.weights_file, adapter.pattern, adapter.base, str(folder))
        return adapter

    @property
    def weights_file(self) -> Path:
        """Path of the adapter's weights, a safetensors file."""
        return self.folder / WEIGHTS_FILE

    def names(self) -> list[str]:
        """Return the names of the adapter's tensors."""
        return list(_shapes(self.pattern, self.base))

    def tensors(self) -> dict[str, Tensor]:
        """Load the adapter's weights on the CPU, by name."""
        from safetensors.torch import load_file

        return dict(load_file(self.weights_file))

    def check(self, checkpoint: Path) -> None:
        """Raise unless the adapter was made for this checkpoint.

        Raises:
            CheckpointError: it was made for another checkpoint, or this one's format cannot be
                read.
        """
        actual = Checkpoint.read(checkpoint)
        fp8_blocks(checkpoint)
        if (actual.architecture, checkpoint_digest(checkpoint)) != (
            self.base.architecture,
            self.base.digest,
        ):
            raise CheckpointError(
                f"the adapter {self.folder} was trained on {self.base.name} (a "
                f"{self.base.architecture}, digest {self.base.digest[:12]}), and {checkpoint} is "
                "another checkpoint: its config, weights or files differ. Give the checkpoint "
                "that it was trained on, unchanged, or train an adapter for this one."
            )

    def check_pattern(self, pattern: Pattern) -> None:
        """Raise PatternError if the adapter was trained for another pattern."""
        if pattern != self.pattern:
            raise PatternError(
                f"the adapter {self.folder} was trained for the pattern {self.pattern}, and "
                f"{pattern} was asked for. Leave the pattern out, or train an adapter for it."
            )


def indexer_shapes(shape: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return one indexer's tensor shapes by name, from :data:`Base.shape`'s fields.

    Source: ``GlmMoeDsaIndexer`` of transformers and ``Indexer`` of SGLang, which agree.
    """
    hidden, rank = shape["hidden_size"], shape["q_lora_rank"]
    heads, width = shape["index_n_heads"], shape["index_head_dim"]
    return {
        "wq_b.weight": (heads * width, rank),
        "wk.weight": (width, hidden),
        "k_norm.weight": (width,),
        "k_norm.bias": (width,),
        "weights_proj.weight": (heads, hidden),
    }


def indexer_layer(name: str) -> int | None:
    """Return the layer of an indexer's tensor from its checkpoint name; None for other tensors."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def _document(folder: Path) -> Document:
    path = folder / ADAPTER_FILE
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{folder} is not an adapter: cannot read {path} ({error.strerror}). Give the folder "
            "that indexcache heal run wrote."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid YAML. Copy or train it again.") from error
    try:
        return Document.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise CheckpointError(
            f"{path} is not an adapter's: {where}: {first['msg']}. Copy or train it again, or "
            "install the version of sglang-indexcache that wrote it."
        ) from error


def _shapes(pattern: Pattern, base: Base) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of an adapter by name."""
    shapes = indexer_shapes(base.shape)
    return {
        f"model.layers.{layer}.self_attn.indexer.{name}": shape
        for layer in pattern.full_layers
        for name, shape in shapes.items()
    }


def check_tensors(weights: Path, pattern: Pattern, base: Base, where: str) -> None:
    """Raise CheckpointError unless a file holds the F layers' indexers, and nothing else."""
    expected, tensors = _shapes(pattern, base), tensors_in(weights)
    if missing := [name for name in expected if name not in tensors]:
        raise CheckpointError(
            f"{where} has no {missing[0]}"
            + (f" and lacks {len(missing) - 1} more tensors" if len(missing) > 1 else "")
            + ": an adapter holds the whole indexer of each F layer. Train it again."
        )
    if extra := sorted(tensors.keys() - expected.keys()):
        raise CheckpointError(
            f"{where} holds {extra[0]}, which is no part of an F layer's indexer under "
            f"{pattern}. An adapter holds nothing else."
        )
    for name, (_, dtype, shape) in tensors.items():
        if shape != expected[name] or dtype not in _PLAIN:
            raise CheckpointError(
                f"{where} holds {name} as {dtype} of shape {list(shape)}; it must be "
                f"{' or '.join(_PLAIN)} of shape {list(expected[name])}"
            )


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, or raise CheckpointError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
