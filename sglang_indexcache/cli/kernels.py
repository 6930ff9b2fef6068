"""``indexcache kernels list``: which ones run here, and compiling them ahead."""

from __future__ import annotations

from typing import Annotated

import typer

from sglang_indexcache.cli.common import group, out

app = group("Our GPU kernels.")


@app.command("list")
def kernels_command() -> None:
    """Say which implementation of every kernel would run on this machine, and why."""
    from sglang_indexcache.kernels.dispatch import Machine
    from sglang_indexcache.kernels.report import print_table

    print_table(Machine.here(), out)


@app.command("build")
def build_kernels_command(
    show: Annotated[
        bool, typer.Option("--show", help="Print the registers and spills of every kernel.")
    ] = False,
) -> None:
    """Compile the CUDA kernels for Hopper (sm_90a) ahead of their first use; needs no GPU."""
    from sglang_indexcache.kernels.command import build_kernels

    build_kernels(out, show=show)
