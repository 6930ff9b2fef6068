"""Which implementation of an op runs: a table, and the reasons to read beside it.

An op has up to four implementations: ``engine`` is SGLang's own kernel, outside this package;
``cuda`` is ours for Hopper, ``triton`` ours for every card since Ampere, ``reference`` readable
torch. The engine's is the default wherever there is no committed measurement that ours is correct
and faster (:data:`DEFAULTS`); ours is opt-in by flag. Opted in, the first of :data:`ORDER` that can
run does.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias, get_args

import torch

from sglang_indexcache.errors import KernelError
from sglang_indexcache.kernels.contract import OPS, Limits, OpName

Implementation: TypeAlias = Literal["cuda", "triton", "reference"]
ORDER: tuple[Implementation, ...] = get_args(Implementation)
ENGINE = "engine"

HOMES: dict[OpName, tuple[str, str]] = {
    "indexer_logits_prefill": ("indexer", "indexer_logits_prefill"),
    "indexer_logits_decode": ("indexer", "indexer_logits_decode"),
    "indexer_select_prefill": ("indexer", "indexer_select_prefill"),
    "indexer_select_decode": ("indexer", "indexer_select_decode"),
    "topk": ("topk", "topk"),
    "sparse_mla_prefill": ("sparse_mla", "sparse_mla"),
    "sparse_mla_decode": ("sparse_mla", "sparse_mla"),
}
"""Folder and function of every op: ``kernels/<folder>/<implementation>.py``."""

TRITON = Limits(oldest=(8, 0))


@dataclass(frozen=True)
class Evidence:
    """Why ours is a default: a measurement in the repository.

    Attributes:
        implementation: which of ours.
        result: path of the JSON below ``benchmarks/results``.
    """

    implementation: Implementation
    result: str


DEFAULTS: dict[tuple[OpName, tuple[int, int]], Evidence] = {}
"""(op, compute capability) -> evidence. Empty: nothing has been measured on a GPU yet."""


@dataclass(frozen=True)
class Machine:
    """Where kernels would run.

    Attributes:
        name: the card, or "CPU".
        capability: compute capability; None without a GPU.
        interpreted: Triton's interpreter is on (``TRITON_INTERPRET=1``).
    """

    name: str
    capability: tuple[int, int] | None
    interpreted: bool = False

    @classmethod
    def here(cls) -> "Machine":
        """This process's machine."""
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if not torch.cuda.is_available():
            return cls("CPU", None, interpreted)
        return cls(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), interpreted)


@dataclass(frozen=True)
class Shape:
    """What of a call decides whether an implementation can run it; None is "any".

    Attributes:
        heads: indexer or MLA heads.
        topk: k.
        next_n: query rows per request in decode.
        cache: dtype of the latent cache.
    """

    heads: int | None = None
    topk: int | None = None
    next_n: int | None = None
    cache: torch.dtype | None = None


@dataclass(frozen=True)
class Verdict:
    """Whether an implementation can run, and why or why not."""

    implementation: Implementation
    runs: bool
    why: str


@dataclass(frozen=True)
class Decision:
    """What runs an op.

    Attributes:
        op: the op.
        default: what runs without a flag.
        opt_in: what runs with the flag that asks for ours.
        why: of the default, in a sentence.
        verdicts: on every implementation of ours, best first.
    """

    op: OpName
    default: str
    opt_in: Implementation
    why: str
    verdicts: tuple[Verdict, ...]


def decide(op: OpName, machine: Machine, shape: Shape | None = None) -> Decision:
    """Look an op up in the table.

    Args:
        machine: where.
        shape: of the call; every limit that it leaves open is taken to hold.
    """
    verdicts = tuple(judge(op, name, machine, shape or Shape()) for name in ORDER)
    opt_in = next(verdict.implementation for verdict in verdicts if verdict.runs)
    if machine.capability is None:
        why = "no GPU: the CPU platform has blocked torch of its own (kernels/*/cpu.py)"
        return Decision(op, "cpu", opt_in, why, verdicts)
    evidence = DEFAULTS.get((op, machine.capability))
    if evidence is None:
        why = "no committed measurement shows ours to be faster on this card"
        return Decision(op, ENGINE, opt_in, why, verdicts)
    if not judge(op, evidence.implementation, machine, shape or Shape()).runs:
        why = f"{evidence.implementation} is faster, but cannot run here"
        return Decision(op, ENGINE, opt_in, why, verdicts)
    why = f"measured: benchmarks/results/{evidence.result}"
    return Decision(op, evidence.implementation, opt_in, why, verdicts)


def judge(op: OpName, name: Implementation, machine: Machine, shape: Shape) -> Verdict:
    """Whether implementation ``name`` of ``op`` can run ``shape`` on ``machine``."""
    if name == "reference":
        return Verdict(name, True, "torch, for tests and as a last resort")
    if name == "triton" and machine.interpreted:
        return Verdict(name, True, "interpreted on the CPU (TRITON_INTERPRET=1), for tests")
    missing = _missing_triton() if name == "triton" else _missing_cuda()
    limits = TRITON if name == "triton" else _cuda_limits().get(op)
    obstacle = "not written" if limits is None else _obstacle(limits, machine, shape)
    obstacle = obstacle or missing
    return Verdict(name, obstacle is None, obstacle or "can run")


def load(op: OpName, name: Implementation) -> Callable[..., Any]:
    """The function that implements ``op``.

    Raises:
        KernelError: it is not part of this installation, or cannot be imported here.
    """
    folder, function = HOMES[op]
    try:
        found = importlib.import_module(f"{__package__}.{folder}.{name}")
    except ImportError as error:
        raise KernelError(f"{op}: the {name} implementation cannot be loaded: {error}") from error
    implementation: Callable[..., Any] = getattr(found, function)
    return implementation


def require(op: OpName, name: Implementation, machine: Machine, shape: Shape) -> Callable[..., Any]:
    """The function that the user asked for by name.

    Raises:
        KernelError: it cannot run; the message says why and what can.
    """
    verdict = judge(op, name, machine, shape)
    if not verdict.runs:
        others = [v.implementation for v in decide(op, machine, shape).verdicts if v.runs]
        raise KernelError(
            f"{op}: {name} cannot run on {machine.name}: {verdict.why}; these can: "
            f"{', '.join(others)}"
        )
    return load(op, name)


def table(machine: Machine) -> list[Decision]:
    """The decisions on every op."""
    return [decide(op, machine) for op in OPS]


def _obstacle(limits: Limits, machine: Machine, shape: Shape) -> str | None:
    """The first limit that does not hold, in words."""
    needs_gpu = limits.oldest is not None or limits.architectures
    if needs_gpu and machine.capability is None:
        return "needs an NVIDIA GPU"
    capability = machine.capability or (0, 0)
    if limits.architectures and capability not in limits.architectures:
        return f"is for {_versions(limits.architectures)}, this is {_version(capability)}"
    if limits.oldest and capability < limits.oldest:
        return f"needs compute capability {_version(limits.oldest)}, this is {_version(capability)}"
    if shape.heads is not None and limits.heads and shape.heads not in limits.heads:
        return f"knows {_numbers(limits.heads)} heads, not {shape.heads}"
    if shape.topk is not None and shape.topk > limits.topk:
        return f"knows k up to {limits.topk}, not {shape.topk}"
    if shape.next_n is not None and shape.next_n not in limits.next_n:
        return f"knows next_n {_numbers(limits.next_n)}, not {shape.next_n}"
    if shape.cache is not None and shape.cache not in limits.caches:
        return f"cannot read a cache of {str(shape.cache).removeprefix('torch.')}"
    return None


def _cuda_limits() -> dict[OpName, Limits]:
    try:
        module = importlib.import_module(f"{__package__}.limits")
    except ImportError:
        return {}
    limits: dict[OpName, Limits] = module.LIMITS
    return limits


@cache
def _missing_cuda() -> str | None:
    """Why CUDA kernels cannot be built or loaded here."""
    try:
        module = importlib.import_module(f"{__package__}.cuda")
    except ImportError as error:
        return f"cannot be imported: {error}"
    missing: str | None = module.unavailable()
    return missing


@cache
def _missing_triton() -> str | None:
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    return None


def _version(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _versions(capabilities: frozenset[tuple[int, int]]) -> str:
    return ", ".join(_version(capability) for capability in sorted(capabilities))


def _numbers(numbers: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
