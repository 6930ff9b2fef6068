"""Implementations of each op, and the machines on which they can run.

``cuda`` has our kernels for Hopper, ``reference`` is readable torch. The engine's own kernels are
outside this package; a server runs them unless the user asks for ours by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    import torch

from sglang_indexcache.errors import KernelError
from sglang_indexcache.kernels.build import unavailable
from sglang_indexcache.kernels.contract import OPS, OpName

Capability: TypeAlias = tuple[int, int]
Phase: TypeAlias = Literal["prefill", "decode"]
HOPPER: Capability = (9, 0)


ROUTED: tuple[tuple[OpName, Phase], ...] = (
    ("select", "prefill"),
    ("select", "decode"),
    ("sparse_mla", "prefill"),
    ("sparse_mla", "decode"),
)
"""Operations whose kernels a server chooses separately."""


@dataclass(frozen=True)
class Machine:
    """Machine where kernels would run: a card by its driver's name, or "CPU" (no capability)."""

    name: str
    capability: Capability | None

    @classmethod
    def here(cls) -> Machine:
        """Return this process's machine."""
        import torch

        if not torch.cuda.is_available():
            return cls("CPU", None)
        return cls(torch.cuda.get_device_name(), torch.cuda.get_device_capability())

    @property
    def device(self) -> torch.device:
        """Torch device for tensors on this machine."""
        import torch

        return torch.device("cpu" if self.capability is None else "cuda")


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of SMs of a GPU."""
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count)


Reason: TypeAlias = str | None
"""Sentence that says why something is impossible, or None if it is possible."""


def _unless_hopper(machine: Machine) -> Reason:
    if machine.capability is None:
        return "needs an NVIDIA GPU"
    if machine.capability != HOPPER:
        return "is for {}.{}, this is {}.{}".format(*HOPPER, *machine.capability)
    return None


@dataclass(frozen=True)
class Implementation:
    """One set of kernels: ``kernels/<folder>/<name>.py`` in the folders of ``contract.OPS``.

    Such a module may also have a function ``prepare()``, which compiles the kernels of its ops.

    Attributes:
        unfit: returns why it cannot run on a machine's card, or None.
        missing: returns why it cannot be built or imported here, or None.
    """

    name: str
    unfit: Callable[[Machine], Reason] = lambda _machine: None
    missing: Callable[[], Reason] = lambda: None

    def obstacle(self, machine: Machine) -> Reason:
        """Return why this implementation cannot run on ``machine``, or None if it can."""
        return self.unfit(machine) or self.missing()

    def load(self, op: OpName) -> Callable[..., Any]:
        """Return the function of ``op``, already compiled, as the first call may be in a capture.

        Raises:
            KernelError: the function cannot be imported or compiled here.
        """
        try:
            module = importlib.import_module(f"{__package__}.{OPS[op]}.{self.name}")
        except ImportError as error:
            raise KernelError(f"{op}: {self.name} cannot be loaded: {error}") from error
        getattr(module, "prepare", lambda: None)()
        function: Callable[..., Any] = getattr(module, op)
        return function

    def check(self, machine: Machine) -> Implementation:
        """Return this implementation if it can run, for a user who asked for it by name.

        Raises:
            KernelError: it cannot run; the message says why and what can.
        """
        if obstacle := self.obstacle(machine):
            can = ", ".join(other.name for other in running(machine))
            raise KernelError(
                f"{self.name} cannot run on {machine.name}: {obstacle}; these can: {can}"
            )
        return self


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation("cuda", _unless_hopper, cache(unavailable)),
    Implementation("reference"),
)
"""Implementations, best first; ``reference`` is the oracle of the tests, not meant for serving."""
AUTO = "auto"
"""Choice that asks for the kernels that a card's record allows (``routes.py``)."""
NAMES = tuple(implementation.name for implementation in IMPLEMENTATIONS)


def named(name: str) -> Implementation:
    """Return the implementation called ``name``, one of :data:`NAMES`."""
    return next(implementation for implementation in IMPLEMENTATIONS if implementation.name == name)


def stated_overlap(request: str) -> int | None:
    """Return the overlap of neighbouring lists, in percent, stated with ``auto``; None without it.

    Args:
        request: ``auto``, or ``auto:70`` where neighbouring rows' lists share 70 % at least.

    Raises:
        KernelError: the percentage is not a number from 0 to 100.
    """
    name, colon, percent = request.partition(":")
    if name != AUTO:
        return None
    if not colon:
        return 0
    if not (percent.isdecimal() and int(percent) <= 100):
        raise KernelError(
            f"{request!r} does not say what share of neighbouring rows' lists is the same at "
            f"least, in percent: write {AUTO}:70, or {AUTO} where it is not known"
        )
    return int(percent)


def chosen(request: str) -> tuple[str, tuple[tuple[OpName, Phase], ...]]:
    """Return the implementation that was asked for by name, and the :data:`ROUTED` operations.

    Args:
        request: ``cuda`` for all of them; ``cuda:sparse_mla``, ``cuda:prefill`` and
            ``cuda:select-prefill`` for some; commas join such parts.

    Raises:
        KernelError: no implementation or operation has such a name.
    """
    name, colon, listed = request.partition(":")
    parts = [part.strip() for part in listed.split(",")] if colon else []
    operations = {part for op, phase in ROUTED for part in (op, phase, f"{op}-{phase}")}
    if name not in NAMES or not operations.issuperset(parts):
        raise KernelError(
            f"{request!r} is not {AUTO}, or one of {', '.join(NAMES)}, alone or with operations "
            f"behind a colon, joined by commas: {', '.join(sorted(operations))}"
        )
    return name, tuple(
        (op, phase) for op, phase in ROUTED if not parts or {op, phase, f"{op}-{phase}"} & {*parts}
    )


def running(machine: Machine) -> list[Implementation]:
    """Return every implementation that can run on ``machine``, best first."""
    return [
        implementation
        for implementation in IMPLEMENTATIONS
        if implementation.obstacle(machine) is None
    ]
