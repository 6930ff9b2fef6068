"""Unions of the lists of neighbouring rows: how many keys packed attention gathers.

Runs a checkpoint in transformers over the text that searches use and counts, for every layer, the
union of 2 to 8 neighbouring rows' lists over the length of one list. Rows that see no more tokens
than a list has are left out. These are selections of trained indexers, not made ones; a small model
says little of a large one with lists of 2,048.

- The small trained checkpoint, a model of byte-like tokens. Texts longer than 512 tokens are longer
  than those that it was trained on; its positions end at 8,192.
- Another one (``--model``, the real one for example) with lists of 1/16 and 1/64 of 2,048 tokens,
  as lists of 2,048 are of 32Ki and 128Ki.

python -m benchmarks.kernels.unions
python -m benchmarks.kernels.unions --model runs/smollm2/built
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sglang_indexcache
from benchmarks.records import read_arguments
from sglang_indexcache.lab.latency.tables import Grid
from sglang_indexcache.lab.runs.provenance import machine
from sglang_indexcache.lab.search.calibration import Score
from sglang_indexcache.lab.search.evaluators.hf import TransformersEvaluator
from sglang_indexcache.lab.search.setup import Setup
from sglang_indexcache.library.writing import write_json

TINY = Path(sglang_indexcache.__file__).parent / "lab" / "demo" / "tiny-dsa"
TRAINED_FOR = 512
"""Tokens: the length of the texts that the small checkpoint was trained on."""
ROWS = range(1, 9)
SETTINGS = (
    *((64, 512), (32, 512), (16, 512)),
    *((64, 1024), (64, 2048), (64, 4096)),
    *((256, 2048), (256, 4096), (512, 4096), (1024, 8192)),
)
"""Length of a list, and of the text."""
OF_ANOTHER = ((128, 2048), (32, 2048))
"""The same for another checkpoint."""


def with_lists(model: Path, folder: Path, topk: int) -> Path:
    """Make a checkpoint with other lists' length: a config beside links to its files."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.name != "config.json" and not (folder / file.name).exists():
            (folder / file.name).symlink_to(file.resolve())
    config = json.loads((model / "config.json").read_text())
    write_json(folder / "config.json", config | {"index_topk": topk})
    return folder


def union_sizes(lists: NDArray[np.integer], rows: int, tokens: int) -> NDArray[np.floating]:
    """Count the keys that neighbouring rows select between them, over the keys of one.

    Args:
        lists: ``[T, k]`` positions, -1 for none.
        rows: that share a tile.
        tokens: of the sequence, at least all positions + 1.

    Returns:
        One number a tile of rows that see more than k tokens.
    """
    full = lists[lists.shape[1] :]
    chosen = np.zeros((len(full), tokens), dtype=bool)
    np.put_along_axis(chosen, full, values=True, axis=1)
    tiles = chosen[: len(full) // rows * rows].reshape(-1, rows, tokens)
    sizes: NDArray[np.floating] = tiles.any(1).sum(1) / lists.shape[1]
    return sizes


def measure(checkpoint: Path, topk: int, length: int, texts: int, work: Path) -> dict[str, Any]:
    """Return means over tiles, by rows of a tile: of each layer."""
    model = with_lists(checkpoint, work / f"top{topk}", topk)
    setup = Setup.read(model, context=length, batches=texts, score=Score.ALL)
    evaluator = TransformersEvaluator(model, setup.calibration)
    selected = [evaluator.selected(ids) for ids in setup.calibration.sequences]
    unions = {
        rows: [
            float(
                np.mean(np.concatenate([union_sizes(lists[n], rows, length) for lists in selected]))
            )
            for n in range(evaluator.num_layers)
        ]
        for rows in ROWS
    }
    by_layer = {str(rows): [round(mean, 3) for mean in means] for rows, means in unions.items()}
    return {"list": topk, "tokens": length, "texts": len(selected), "data": setup.data} | {
        "union": by_layer
    }


def table(record: Mapping[str, Any]) -> str:
    """Tabulate means over layers."""
    header = ("list, text", *(f"{rows} rows" for rows in ROWS))
    cells = tuple(
        (
            f"{row['list']} of {row['tokens']}",
            *(f"{np.mean(by_layer):.2f}" for by_layer in row["union"].values()),
        )
        for row in record["rows"]
    )
    return Grid("", header, cells).to_markdown()


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--texts", type=int, default=16, help=f"of {TRAINED_FOR} tokens; fewer of longer ones"
    )
    parser.add_argument("--model", type=Path, default=TINY, help="a DSA checkpoint's folder")
    options = read_arguments(parser, "kernels/unions.json", quick={"texts": 1})
    settings = SETTINGS if options.model == TINY else OF_ANOTHER
    with tempfile.TemporaryDirectory() as work:
        rows = [
            measure(
                options.model,
                topk,
                length,
                max(1, options.texts * TRAINED_FOR // length),
                Path(work),
            )
            for topk, length in settings
        ]
    record = {
        "command": options.command,
        "model": options.model.name,
        "machine": machine(),
        "rows": rows,
    }
    write_json(options.output, record)
    print(table(record))


if __name__ == "__main__":
    main()
