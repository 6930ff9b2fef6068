"""Where a benchmark writes, its quick form, and the command that its record keeps.

Committed results are replaced only by a run that is told to with ``--publish``.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
RUNS = Path("runs/benchmarks")
"""Where everything else goes: below the folder that the command was called in."""


def read_arguments(
    parser: argparse.ArgumentParser,
    name: str,
    argv: Sequence[str] | None = None,
    quick: dict[str, Any] | None = None,
) -> argparse.Namespace:
    """The command line, with ``--output``, ``--publish`` and ``--quick`` added.

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
    given = list(sys.argv[1:] if argv is None else argv)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--output", type=Path, help=f"default: {RUNS / name}")
    where.add_argument("--publish", action="store_true", help="replace the committed results")
    if quick is not None:
        shown = ", ".join(f"{key} {value}" for key, value in quick.items())
        parser.add_argument("--quick", action="store_true", help=f"a small run: {shown}")
        if "--quick" in given:
            parser.set_defaults(**quick)
            if "--publish" in given:
                parser.error("--quick is for looking: what is published is run whole")
    arguments = parser.parse_args(given)
    if arguments.publish:
        arguments.output = RESULTS / name
    elif arguments.output is None:
        arguments.output = RUNS / name
    arguments.command = command(parser.prog, given)
    return arguments


def command(program: str, given: Sequence[str]) -> str:
    """What a reader types to run this again."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = f"python -m {spec.name}" if spec is not None else program
    return shlex.join([*module.split(), *given])
