"""Records: where a benchmark writes, the command that one keeps, how pages show its numbers.

Committed results are replaced only by a run that is told to with ``--publish``.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sglang_indexcache.lab.latency.tables import Grid

RESULTS = Path(__file__).parent / "results"
NOT_MEASURED = "not measured"
RUNS = Path("runs/benchmarks")
"""Where everything else goes: below the folder that the command was called in."""


def read_arguments(
    parser: argparse.ArgumentParser,
    name: str,
    argv: Sequence[str] | None = None,
    quick: dict[str, Any] | None = None,
) -> argparse.Namespace:
    """Read the command line, with ``--output``, ``--publish`` and ``--quick`` added.

    Args:
        parser: with the benchmark's own options.
        name: of the result below ``benchmarks/results``, a file or a folder.
        argv: the arguments; the process's own by default.
        quick: defaults that ``--quick`` replaces, for a run of at most a few minutes. None where
            the benchmark is quick as it is.

    Returns:
        The arguments. ``output`` is decided; ``command`` is the line that was called, with its
        module's name of today.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--output", type=Path, help=f"default: {RUNS / name}")
    where.add_argument("--publish", action="store_true", help="replace the committed results")
    if quick is not None:
        settings = ", ".join(f"{key} {value}" for key, value in quick.items())
        parser.add_argument("--quick", action="store_true", help=f"a small run: {settings}")
        if "--quick" in words:
            parser.set_defaults(**quick)
            if "--publish" in words:
                parser.error("--quick is for looking: what is published is run whole")
    arguments = parser.parse_args(words)
    if arguments.publish:
        arguments.output = RESULTS / name
    elif arguments.output is None:
        arguments.output = RUNS / name
    arguments.command = command(parser.prog, words)
    return arguments


def command(program: str, words: Sequence[str]) -> str:
    """Return what a reader types to run this again."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = f"python -m {spec.name.removesuffix('.__main__')}" if spec is not None else program
    return shlex.join([*module.split(), *words])


def markdown(header: Iterable[str], rows: Iterable[Iterable[object]], title: str = "") -> str:
    """Write a table for a page."""
    cells = tuple(tuple(map(str, row)) for row in rows)
    return Grid(title, tuple(header), cells).to_markdown()


def estimate(mean: float, half_width: float | None, scale: float = 1, *, sign: str = "+") -> str:
    """Write a mean with half of its interval: three digits behind the point, or one (x 100).

    Args:
        mean: in the unit of the record.
        half_width: of its interval; None where it is not known.
        scale: to the unit of the page.
        sign: how numbers are signed, as in a format; "" for what is no difference.
    """
    digits = 3 if scale == 1 else 1
    margin = "" if half_width is None else f" ± {scale * half_width:.{digits}f}"
    return f"{scale * mean:{sign}.{digits}f}{margin}"
