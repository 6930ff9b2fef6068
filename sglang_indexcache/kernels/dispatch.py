"""Which implementation of an op runs: a table, and the reasons to read beside it.

``cuda`` is ours for Hopper, ``triton`` ours for every card since Ampere, ``reference`` readable
torch. The engine's own kernels are outside of this package, and are what a server runs unless it is
asked for ours by name, or by ``auto`` where a committed measurement says that ours are faster
(:data:`MEASURED`).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    import torch

from sglang_indexcache.errors import KernelError
from sglang_indexcache.kernels.contract import OPS, OpName

Capability: TypeAlias = tuple[int, int]
Phase: TypeAlias = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Machine:
    """Where kernels would run: a card as its driver calls it, or "CPU" without a capability.

    ``interpreted`` says that Triton's interpreter is on (``TRITON_INTERPRET=1``).
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


Reason: TypeAlias = str | None
"""Why something cannot be, in words, or None if it can."""


def _needs(
    oldest: Capability, *, exactly: bool = False, interpreted: bool = False
) -> Callable[[Machine], Reason]:
    """What an implementation says of machines that it is not for."""

    def unfit(machine: Machine) -> Reason:
        found = machine.capability
        if interpreted and machine.interpreted:
            return None
        if found is None:
            return "needs an NVIDIA GPU"
        if found == oldest or (found > oldest and not exactly):
            return None
        wants = "is for" if exactly else "needs compute capability"
        return "{} {}.{}, this is {}.{}".format(wants, *oldest, *found)

    return unfit


@dataclass(frozen=True)
class Implementation:
    """One set of kernels: ``kernels/<folder>/<name>.py`` in the folders of ``contract.OPS``.

    Such a module may also have a function ``prepare()``, which compiles what its ops call.

    Attributes:
        missing: why it cannot be built or imported here.
        distrust: why ``auto`` may not take what its compiler made.
    """

    name: str
    unfit: Callable[[Machine], Reason] = lambda _machine: None
    missing: Callable[[], Reason] = lambda: None
    distrust: Callable[[], Reason] = lambda: None

    def obstacle(self, machine: Machine) -> Reason:
        """Why it cannot run on ``machine``."""
        return self.unfit(machine) or self.missing()

    def load(self, op: OpName) -> Callable[..., Any]:
        """The function that implements ``op``, compiled: a first call may be a graph's capture.

        Raises:
            KernelError: it cannot be imported or compiled here.
        """
        try:
            module = importlib.import_module(f"{__package__}.{OPS[op]}.{self.name}")
        except ImportError as error:
            raise KernelError(f"{op}: {self.name} cannot be loaded: {error}") from error
        getattr(module, "prepare", lambda: None)()
        function: Callable[..., Any] = getattr(module, op)
        return function

    def check(self, machine: Machine) -> Implementation:
        """Itself, where the user asked for it by name.

        Raises:
            KernelError: it cannot run; the message says why and what can.
        """
        if obstacle := self.obstacle(machine):
            can = ", ".join(other.name for other in running(machine))
            raise KernelError(
                f"{self.name} cannot run on {machine.name}: {obstacle}; these can: {can}"
            )
        return self


@cache
def _missing_cuda() -> Reason:
    from sglang_indexcache.kernels.cuda import unavailable

    return unavailable()


@cache
def _missing_triton() -> Reason:
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    return None


@cache
def _distrust_cuda() -> Reason:
    from sglang_indexcache.kernels.build import doubt

    return doubt()


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation("cuda", _needs((9, 0), exactly=True), _missing_cuda, _distrust_cuda),
    Implementation("triton", _needs((8, 0), interpreted=True), _missing_triton),
    Implementation("reference"),
)
"""Best first; ``reference`` is the truth that the others are compared with, not meant to serve."""
NAMES = tuple(implementation.name for implementation in IMPLEMENTATIONS)


@dataclass(frozen=True)
class KernelMeasurement:
    """A committed measurement: there, ours was right and faster than all that SGLang can run.

    At every length and number of rows that were timed and, for attention, with either cache, since
    neither decides which kernel a server loads.

    Attributes:
        card: that was measured, as its driver calls it: an H20 has an H100's compute capability and
            a seventh of its tensor cores' rate.
        heads: on one GPU: of the indexer for ``select``, of attention for ``sparse_mla``.
        topk: tokens that the model selects.
        record: the JSON below ``benchmarks/results`` that shows it.
    """

    op: OpName
    phase: Phase
    card: str
    heads: int
    topk: int
    implementation: str
    record: str


MEASURED: tuple[KernelMeasurement, ...] = ()
"""All that ``--indexcache-kernels auto`` may take. Empty: no card has timed ours beside SGLang's.
Estimates by a model of the chip have no place here, however large: what they leave out is not known
before a card has run the kernels (docs/kernels.md)."""


def measured(
    op: OpName, phase: Phase, machine: Machine, heads: int, topk: int
) -> KernelMeasurement | None:
    """The row of :data:`MEASURED` for just this, or None."""
    wanted = op, phase, machine.name, heads, topk
    for row in MEASURED:
        if (row.op, row.phase, row.card, row.heads, row.topk) == wanted:
            return row
    return None


def named(name: str) -> Implementation:
    """The implementation called ``name``, one of :data:`NAMES`."""
    return next(one for one in IMPLEMENTATIONS if one.name == name)


def running(machine: Machine) -> list[Implementation]:
    """Every implementation that can run on ``machine``, best first."""
    return [one for one in IMPLEMENTATIONS if one.obstacle(machine) is None]
