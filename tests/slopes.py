"""Slopes that were fitted to nothing: any other number shows."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.library import LayerSlopes, Slopes
from sglang_indexcache.study.provenance import checkpoint_digest


def random_slopes(
    folder: Path, path: Path, *, exact: Collection[int] = (), seed: int = 1
) -> Slopes:
    """Write a file of random slopes for a checkpoint; the layers ``exact`` do not fold."""
    checkpoint = Checkpoint.read(folder)
    heads = int(checkpoint.shape["index_n_heads"])
    draw = torch.Generator().manual_seed(seed)
    rows = torch.rand(checkpoint.num_layers, heads, generator=draw).tolist()
    layers = tuple(
        LayerSlopes(slopes=tuple(round(x, 6) for x in row), missed={}, folds=number not in exact)
        for number, row in enumerate(rows)
    )
    slopes = Slopes(
        name=folder.name,
        architecture=checkpoint.architecture,
        checkpoint=checkpoint_digest(folder),
        layers=layers,
        path=path,
    )
    slopes.write()
    return Slopes.read(path)
