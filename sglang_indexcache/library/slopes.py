"""Slopes of a checkpoint's indexers, in a file: by what a pattern's layers fold.

``indexcache fold calibrate`` writes it. A pattern names it by the digest of what it holds, so that
a pattern with other slopes is another pattern wherever patterns are compared.
"""

from __future__ import annotations

import json
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import CheckpointError, LibraryError
from sglang_indexcache.library.files import Strict
from sglang_indexcache.pattern import SLOPES_FILE, Pattern, check_foldable
from sglang_indexcache.support.files import write_whole


class LayerSlopes(Strict):
    """One layer's slopes, one a head, and how well it folds by them.

    ``missed`` is the share of the exact picks that are not among the folded score's best 1, 2 and
    4 lengths of a list, on text that the slopes were not fitted to. A layer that misses too many
    ``folds`` not: its score stays exact.
    """

    slopes: tuple[float, ...] = Field(min_length=1)
    missed: dict[str, float]
    folds: bool = True


class Slopes(Strict):
    """A file of slopes.

    Attributes:
        name, architecture: of the checkpoint that it is for, to tell a person.
        checkpoint: ``study.provenance.checkpoint_digest`` of that checkpoint.
        layers: one for each position of a pattern; None where the checkpoint has no indexer.
        record: how they were fitted: data, tokens, versions.
        path: of the file, which does not say it.
    """

    format: Literal[1] = 1
    name: str
    architecture: str
    checkpoint: str = Field(pattern=r"^[0-9a-f]{64}$")
    layers: tuple[LayerSlopes | None, ...] = Field(min_length=1)
    record: dict[str, Any] = Field(default_factory=dict)
    path: Path = Field(exclude=True)

    @classmethod
    def read(cls, path: Path) -> Slopes:
        """Read a file.

        Raises:
            LibraryError: there is none, or it is no file of slopes.
        """
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")), path=path)
        except OSError as error:
            raise LibraryError(
                f"cannot read the slopes {path}: {error.strerror}. `indexcache fold calibrate` "
                "writes them."
            ) from error
        except (ValueError, TypeError) as error:  # no UTF-8, no JSON, no object, other fields
            raise LibraryError(
                f"{path} is no file of slopes: `indexcache fold calibrate` writes one. Copy it "
                "again, or fit them again."
            ) from error

    def write(self) -> None:
        """Write the file, in one step."""
        write_whole(self.path, self.model_dump_json(indent=1) + "\n")

    @cached_property
    def digest(self) -> str:
        """Twelve hex digits of the slopes and the checkpoint that they are for."""
        return sha256(json.dumps([self.checkpoint, self.by_layer]).encode()).hexdigest()[:12]

    @property
    def by_layer(self) -> tuple[tuple[float, ...] | None, ...]:
        """:meth:`of` of every layer."""
        return tuple(self.of(layer) for layer in range(len(self.layers)))

    def of(self, layer: int) -> tuple[float, ...] | None:
        """Return the slopes of a layer, one a head; None where the score stays exact."""
        entry = self.layers[layer]
        return entry.slopes if entry is not None and entry.folds else None

    def check_model(self, model: Checkpoint) -> None:
        """Raise CheckpointError for another model, as far as its config tells."""
        heads = {len(layer.slopes) for layer in self.layers if layer is not None}
        head_count = model.shape.get("index_n_heads")
        expected = heads if head_count is None else {int(head_count)}
        if (self.architecture, len(self.layers), heads) != (
            model.architecture,
            model.num_layers,
            expected,
        ):
            raise CheckpointError(
                f"the slopes {self.path} were fitted to {self.name}, a {self.architecture} with "
                f"{len(self.layers)} layers, and this {model.architecture} with "
                f"{model.num_layers} layers is another model. {_FIT}"
            )

    def check_checkpoint(self, digest: str, where: str) -> None:
        """Raise CheckpointError unless ``digest`` is that of the checkpoint they are for."""
        if digest != self.checkpoint:
            raise CheckpointError(
                f"the slopes {self.path} were fitted to {self.name} (digest "
                f"{self.checkpoint[:12]}), and {where} is another checkpoint: its config, weights "
                f"or files differ. {_FIT}"
            )

    def check_pattern(self, pattern: Pattern) -> None:
        """Raise PatternError where an L layer stays exact by these slopes."""
        check_foldable(pattern, self.by_layer, str(self.path))


_FIT = "Fit slopes to this one: indexcache fold calibrate."


def slopes_in(folder: Path, digest: str) -> Slopes | None:
    """Return the slopes of this digest among the files of a folder, if they are there."""
    files = (Slopes.read(path) for path in sorted(folder.glob(f"*{SLOPES_FILE}")))
    return next((slopes for slopes in files if slopes.digest == digest), None)
