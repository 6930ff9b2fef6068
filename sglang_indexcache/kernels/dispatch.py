"""Which implementation of an op runs: a table, and the reasons to read beside it.

``cuda`` is ours for Hopper, ``triton`` ours for every card since Ampere, ``reference`` readable
torch. The engine's own kernels are outside of this package, and are what a server runs unless it is
asked for ours. Ours may become the default only with a committed measurement (:data:`MEASURED`).
"""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

from sglang_indexcache.errors import KernelError
from sglang_indexcache.kernels.contract import OPS, OpName

Capability = tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """Where kernels would run.

    Attributes:
        name: the card, or "CPU".
        capability: compute capability; None without a GPU.
        interpreted: Triton's interpreter is on (``TRITON_INTERPRET=1``).
    """

    name: str
    capability: Capability | None
    interpreted: bool = False

    @classmethod
    def here(cls) -> Machine:
        """This process's machine."""
        import torch

        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if not torch.cuda.is_available():
            return cls("CPU", None, interpreted)
        return cls(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), interpreted)

    @property
    def device(self) -> torch.device:
        """Where its tensors lie."""
        import torch

        return torch.device("cpu" if self.capability is None else "cuda")


@dataclass(frozen=True)
class Limits:
    """The machines that an implementation is for.

    Attributes:
        oldest: the least compute capability; None means that no GPU is needed.
        exactly: whether it must be that one.
        interpreted: whether it also runs on a CPU, under Triton's interpreter.
    """

    oldest: Capability | None = None
    exactly: bool = False
    interpreted: bool = False

    def obstacle(self, machine: Machine) -> str | None:
        """Why ``machine`` is not one of them, in words, or None."""
        found = machine.capability
        if self.oldest is None or (self.interpreted and machine.interpreted):
            return None
        if found is None:
            return "needs an NVIDIA GPU"
        if found == self.oldest or (found > self.oldest and not self.exactly):
            return None
        wants = "is for" if self.exactly else "needs compute capability"
        return "{} {}.{}, this is {}.{}".format(wants, *self.oldest, *found)


@dataclass(frozen=True)
class Implementation:
    """One set of kernels: ``kernels/<folder>/<name>.py`` in the folders of ``contract.OPS``.

    Such a module may also have a function ``prepare()``, which compiles what its ops call.

    Attributes:
        name: of its modules.
        limits: where it can run.
        missing: why it cannot be built or imported here, or None.
        is_reference: the truth that the others are compared with, not meant to serve.
        distrust: why the compiler behind it may not make a default for Hopper, or None.
    """

    name: str
    limits: Limits
    missing: Callable[[], str | None]
    is_reference: bool = False
    distrust: Callable[[], str | None] = lambda: None

    def obstacle(self, op: OpName, machine: Machine) -> str | None:
        """Why it cannot run ``op`` on ``machine``, or None."""
        if find_spec(self._module(op)) is None:
            return "not written"
        return self.limits.obstacle(machine) or self.missing()

    def doubt(self, machine: Machine) -> str | None:
        """Why nothing takes it by default on ``machine``, where it could run; or None."""
        return self.distrust() if machine.capability == (9, 0) else None

    def load(self, op: OpName) -> Callable[..., Any]:
        """The function that implements ``op``, compiled: a first call may be a graph's capture.

        Raises:
            KernelError: it cannot be imported or compiled here.
        """
        try:
            module = importlib.import_module(self._module(op))
        except ImportError as error:
            raise KernelError(f"{op}: {self.name} cannot be loaded: {error}") from error
        getattr(module, "prepare", lambda: None)()
        function: Callable[..., Any] = getattr(module, op)
        return function

    def check(self, op: OpName, machine: Machine) -> Implementation:
        """Itself, where the user asked for it by name.

        Raises:
            KernelError: it cannot run ``op``; the message says why and what can.
        """
        obstacle = self.obstacle(op, machine)
        if obstacle:
            can = ", ".join(other.name for other in running(op, machine))
            raise KernelError(
                f"{op}: {self.name} cannot run on {machine.name}: {obstacle}; these can: {can}"
            )
        return self

    def _module(self, op: OpName) -> str:
        return f"{__package__}.{OPS[op]}.{self.name}"


@cache
def _missing_cuda() -> str | None:
    from sglang_indexcache.kernels.cuda import unavailable

    return unavailable()


@cache
def _missing_triton() -> str | None:
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    return None


@cache
def _distrust_cuda() -> str | None:
    from sglang_indexcache.kernels.cuda import doubt

    return doubt()


@cache
def _distrust_triton() -> str | None:
    from triton import knobs

    from sglang_indexcache.kernels.compilers import doubt, version_said

    path = knobs.nvidia.ptxas.path
    words = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return doubt("Triton's ptxas", version_said(words) or ())


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation("cuda", Limits((9, 0), exactly=True), _missing_cuda, distrust=_distrust_cuda),
    Implementation(
        "triton", Limits((8, 0), interpreted=True), _missing_triton, distrust=_distrust_triton
    ),
    Implementation("reference", Limits(), lambda: None, is_reference=True),
)
"""Best first."""
NAMES = tuple(implementation.name for implementation in IMPLEMENTATIONS)

MEASURED: dict[tuple[OpName, Capability | None], tuple[str, str]] = {}
"""(op, card) -> the best implementation there, and the JSON below ``benchmarks/results`` in which
it is correct and faster than the engine's kernel. Empty: no GPU has measured anything yet."""

FASTER_FROM: dict[int, int] = {32: 32_768, 64: 24_576}
"""Indexer heads -> tokens of context from which ``cuda`` selects for a prefill in no more time than
the engine's kernels; with fewer, a server that was not asked for ours by name takes the engine's.
*Forecast*: ``faster_from`` of benchmarks/results/kernels/forecast.json, which a test compares. A
card's measurement of the lengths (``benchmarks/device_check.sh --only 10``) is to replace it."""


def named(name: str) -> Implementation:
    """The implementation called ``name``, one of :data:`NAMES`."""
    return next(one for one in IMPLEMENTATIONS if one.name == name)


def running(op: OpName, machine: Machine) -> list[Implementation]:
    """Every implementation of ``op`` that can run on ``machine``, what was measured best first."""
    best, _ = MEASURED.get((op, machine.capability), (None, None))
    can = [one for one in IMPLEMENTATIONS if one.obstacle(op, machine) is None]
    return sorted(can, key=lambda one: one.name != best)
