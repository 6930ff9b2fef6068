"""``indexcache kernels build``: compile the CUDA kernels ahead of their first use."""

from time import monotonic

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from sglang_indexcache.kernels.build import FOLDERS, build
from sglang_indexcache.kernels.disassembly import usage


def build_kernels(out: Console, *, show: bool) -> None:
    """Build every library that the cache lacks.

    Args:
        show: also print what every kernel takes, as ``ptxas`` reports it.

    Raises:
        KernelError: no usable nvcc, or a failed compilation.
    """
    table = Table("kernel", "registers", "stack bytes", "spilled bytes", box=SIMPLE)
    for folder in FOLDERS:
        started = monotonic()
        library = build(folder, say=out.print)
        took = f"built in {monotonic() - started:.0f} s" if library.fresh else "in the cache"
        out.print(f"{folder}: {took}, {library.path}", soft_wrap=True)
        for kernel in usage(library.log.read_text()):
            numbers = kernel.registers, kernel.stack, kernel.spills
            table.add_row(kernel.kernel, *map(str, numbers))
    if show:
        out.print(table)
