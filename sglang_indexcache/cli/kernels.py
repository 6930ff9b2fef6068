"""``indexcache kernels``: which of our GPU kernels run here, are they right, and building them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sglang_indexcache.cli.common import command, group, out
from sglang_indexcache.errors import KernelError

if TYPE_CHECKING:
    from sglang_indexcache.kernels.dispatch import Machine

app = group("List, check and build our GPU kernels.")


@command(app, "list", epilog="Example: indexcache kernels list")
def list_command() -> None:
    """Say which implementation can run on this machine, and why the others cannot."""
    from sglang_indexcache.kernels.dispatch import IMPLEMENTATIONS, MEASURED, Machine

    machine = Machine.here()
    _say_machine(machine)
    for one in IMPLEMENTATIONS:
        said = one.obstacle(machine) or "can run"
        out.print(f"  {one.name}: {said}", markup=False, soft_wrap=True)
        if one.missing() is None and (doubt := one.distrust()):
            said = f"--indexcache-kernels auto would not take it: {doubt}"
            out.print(f"  {one.name}: {said}", markup=False, soft_wrap=True)
    measured = {row.op for row in MEASURED if row.card == machine.name}
    out.print(
        "A server runs the engine's own kernels unless --indexcache-kernels asks for these. "
        f"Measured to be faster on this card: {', '.join(sorted(measured)) or 'none'}.",
        soft_wrap=True,
    )
    if machine.capability is not None:
        out.print("Before you serve with one of them, check it here: indexcache kernels check")


@command(app, "check", epilog="Example: indexcache kernels check --implementation triton")
def check_command(
    implementation: str | None = None, sizes: str | None = None, seed: int = 0
) -> None:
    """Check on this machine that our kernels do what their contract says.

    Options:
        implementation (NAME): Check only this one, by its name in the list. Default: all.
        sizes (NAME): Which cases: small, wide (also many short rows) or large (also up to a million
            tokens). Default: large on a GPU, small without one.
    """
    from sglang_indexcache.kernels.dispatch import IMPLEMENTATIONS, NAMES, Machine, named
    from sglang_indexcache.kernels.grid.suite import GROUPS, SIZES, run

    machine = Machine.here()
    sizes = sizes or ("small" if machine.capability is None else "large")
    if sizes not in SIZES:
        raise KernelError(f"--sizes may be {', '.join(SIZES)}, got {sizes!r}")
    if implementation is not None and implementation not in NAMES:
        raise KernelError(f"--implementation may be {', '.join(NAMES)}, got {implementation!r}")
    _say_machine(machine)
    chosen = IMPLEMENTATIONS if implementation is None else (named(implementation),)
    passed = failed = 0
    for one in chosen:
        if obstacle := one.obstacle(machine):
            out.print(f"{one.name}: not run: {obstacle}", markup=False, soft_wrap=True)
            continue
        for name in GROUPS:
            right = wrong = 0
            for outcome in run(one, name, sizes, machine, seed):
                right, wrong = right + (not outcome.complaints), wrong + bool(outcome.complaints)
                for complaint in outcome.complaints:
                    out.print(f"  {outcome.case}: {complaint}", markup=False, soft_wrap=True)
            out.print(f"{one.name}, {name}: {right} passed, {wrong} failed")
            passed, failed = passed + right, failed + wrong
    if failed:
        raise KernelError(f"{failed} cases failed, {passed} passed")
    if not passed:
        raise KernelError(
            "nothing was checked: none of what was asked for can run here (without a GPU Triton's "
            "kernels run if TRITON_INTERPRET=1 is set)"
        )
    out.print(f"all {passed} cases passed")


@command(app, "build", epilog="Example: indexcache kernels build --archive kernels.tar.gz")
def build_command(archive: Path | None = None) -> None:
    """Compile the CUDA kernels for Hopper (sm_90a) ahead of their first use; needs no GPU.

    Options:
        archive (FILE): Also pack the libraries into this .tar.gz. Unpacked in the cache folder of a
            machine without nvcc they are used there.
    """
    from time import monotonic

    from sglang_indexcache.kernels.build import FOLDERS, build, pack
    from sglang_indexcache.kernels.dispatch import named

    if doubt := named("cuda").distrust():
        if archive is not None:
            raise KernelError(f"no archive is made for other machines: {doubt}")
        said = f"--indexcache-kernels auto would not take what is built here: {doubt}"
        out.print(said, markup=False, soft_wrap=True)
    libraries = []
    for folder in FOLDERS:
        started = monotonic()
        libraries.append(library := build(folder, say=out.print))
        took = f"built in {monotonic() - started:.0f} s" if library.fresh else "in the cache"
        out.print(f"{folder}: {took}, {library.path}", soft_wrap=True)
    if archive is not None:
        pack(archive, libraries)
        out.print(f"wrote {archive}", soft_wrap=True)


def _say_machine(machine: Machine) -> None:
    capability = machine.capability
    card = "" if capability is None else f", compute capability {capability[0]}.{capability[1]}"
    out.print(f"{machine.name}{card}")
