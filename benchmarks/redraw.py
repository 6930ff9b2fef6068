"""Draw the committed figures anew from the records beside them; nothing is measured.

python -m benchmarks.redraw
python -m benchmarks.redraw --publish
python -m benchmarks.redraw --figures pdf
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import expect, small_checkpoint
from benchmarks.paper import table_1, table_3
from benchmarks.records import RESULTS, read_arguments
from benchmarks.smollm2 import searched
from sglang_indexcache.lab.latency import tables
from sglang_indexcache.lab.latency.results import load
from sglang_indexcache.lab.runs.plots import FORMATS


def _latency(record: Path, picture: Path) -> None:
    result = load(record)
    draw = table_1.draw_shares if picture.stem == "latency-share" else tables.draw_speedups
    draw(result, picture)


def _of(draw: Callable[[dict[str, Any], Path], None]) -> Callable[[Path, Path], None]:
    return lambda record, picture: draw(json.loads(record.read_text()), picture)


FIGURES: dict[str, tuple[str, Callable[[Path, Path], None]]] = {
    "expect.png": ("expect.json", _of(expect.draw)),
    **{
        f"{folder}/{name}.png": (f"{folder}/searched.json", _of(draw))
        for folder in ("smollm2", "smollm2/random")
        for name, draw in searched.FIGURES.items()
    },
    "training_aware.png": ("training_aware.json", _of(table_3.draw)),
    "small_checkpoint/curves.png": ("small_checkpoint/result.json", _of(small_checkpoint.curves)),
    "small_checkpoint/starved.png": ("small_checkpoint/result.json", _of(small_checkpoint.starved)),
    **{
        f"latency/{run}/latency-{kind}.png": (f"latency/{run}/latency.json", _latency)
        for run in ("cpu", "cpu-dp-attention", "smollm2")
        for kind in ("speedup", "share")
    },
}
"""Figures of studies that can be run, and from which record each is drawn."""
SETTLED = (
    "heal.png",
    "heal_data.png",
    "smollm2/one_pass.png",
    "search/tiny-dsa/served.png",
)
"""Figures of studies whose scripts are gone; this command of commit 4d184eae draws them."""


def main(argv: list[str] | None = None) -> None:
    """Draw them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figures", default="png", choices=[suffix[1:] for suffix in FORMATS])
    arguments = read_arguments(parser, "", argv)
    if arguments.publish and arguments.figures != "png":
        parser.error("the committed figures are PNG, which pages show: leave --figures out")
    for picture, (record, draw) in FIGURES.items():
        path = (arguments.output / picture).with_suffix(f".{arguments.figures}")
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(RESULTS / record, path)
        print(path)


if __name__ == "__main__":
    main()
