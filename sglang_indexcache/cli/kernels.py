"""``indexcache kernels``: which of our GPU kernels run here, and building them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from sglang_indexcache.cli.common import Command, group, out

app = group("List and build our GPU kernels.")

# fmt: off
Archive = Annotated[Path | None, Option("--archive", metavar="FILE", help=
    "Also pack the libraries into this .tar.gz. Unpacked in the cache folder of a machine "
    "without nvcc they are used there.")]
# fmt: on


@app.command("list", cls=Command, epilog="Example: indexcache kernels list")
def list_command() -> None:
    """Say which implementation can run on this machine, and why the others cannot."""
    from sglang_indexcache.kernels.dispatch import IMPLEMENTATIONS, Machine

    machine = Machine.here()
    capability = machine.capability
    card = "" if capability is None else ", compute capability {}.{}".format(*capability)
    out.print(f"{machine.name}{card}")
    for one in IMPLEMENTATIONS:
        said = one.obstacle(machine) or "can run"
        out.print(f"  {one.name}: {said}", markup=False, soft_wrap=True)
    out.print(
        "A server runs the engine's own kernels unless --indexcache-kernels asks for these, which "
        "no card has run yet. Before you serve with them, check them on yours, in a checkout: "
        "python -m tests.kernels.grid",
        soft_wrap=True,
    )


@app.command(
    "build", cls=Command, epilog="Example: indexcache kernels build --archive kernels.tar.gz"
)
def build_command(
    archive: Archive = None,
) -> None:
    """Compile the CUDA kernels for Hopper (sm_90a) ahead of their first use; needs no GPU."""
    from time import monotonic

    from sglang_indexcache.kernels.build import FOLDERS, build, pack, warning_about

    libraries = []
    for folder in FOLDERS:
        started = monotonic()
        libraries.append(library := build(folder, say=out.print))
        took = f"built in {monotonic() - started:.0f} s" if library.fresh else "in the cache"
        out.print(f"{folder}: {took}, {library.path}", soft_wrap=True)
    for warning in sorted({warning_about(one.compiler) or "" for one in libraries} - {""}):
        out.print(f"Warning: {warning}.", markup=False, soft_wrap=True)
    if archive is not None:
        pack(archive, libraries)
        out.print(f"wrote {archive}", soft_wrap=True)
