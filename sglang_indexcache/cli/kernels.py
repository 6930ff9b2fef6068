"""``indexcache kernels``: build our GPU kernels ahead of their first use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from sglang_indexcache.cli.common import Command, group, out

app = group("Build our GPU kernels ahead of their first use.")

# fmt: off
Archive = Annotated[Path | None, Option("--archive", metavar="FILE", help=
    "Also pack the libraries into this .tar.gz. Unpacked in the cache folder of a machine "
    "without nvcc they are used there.")]
# fmt: on


@app.command(
    "build", cls=Command, epilog="Example: indexcache kernels build --archive kernels.tar.gz"
)
def build_command(archive: Archive = None) -> None:
    """Compile the CUDA kernels for Hopper (sm_90a) ahead of their first use; needs no GPU."""
    import tarfile
    from time import monotonic

    from sglang_indexcache.kernels.build import FOLDERS, build, warning_about
    from sglang_indexcache.library.writing import replacing

    libraries = []
    for folder in FOLDERS:
        started = monotonic()
        libraries.append(library := build(folder, say=out.print))
        took = f"built in {monotonic() - started:.0f} s" if library.fresh else "in the cache"
        out.print(f"{folder}: {took}, {library.path}", soft_wrap=True)
    for warning in sorted({warning_about(library.compiler) or "" for library in libraries} - {""}):
        out.print(f"Warning: {warning}.", markup=False, soft_wrap=True)
    if archive is not None:
        # Unpacked in another machine's cache folder, the libraries are found there, if the versions
        # of the sources and of apache-tvm-ffi are the same.
        with replacing(archive) as part, tarfile.open(part, "w:gz") as packed:
            for library in libraries:
                packed.add(library.path.parent, arcname=library.path.parent.name)
        out.print(f"wrote {archive}", soft_wrap=True)
