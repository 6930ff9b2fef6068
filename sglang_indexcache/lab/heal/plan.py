"""Estimate of what a healing takes, before it begins: the same code on tensors without values.

Layers are placed, dequantised and run on torch's meta device, where a tensor has a shape and no
memory. What they would hold at a time and multiply is counted, layers of the same kind once.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from sglang_indexcache.errors import TrainingError
from sglang_indexcache.lab.heal.frozen import FrozenBody
from sglang_indexcache.lab.heal.heal import (
    DTYPES,
    RATES,
    TRIAL_STEPS,
    HealOptions,
    HealStage,
    Target,
)
from sglang_indexcache.lab.heal.local import LocalSharing, Passing, pipelined
from sglang_indexcache.lab.heal.packing import Layout
from sglang_indexcache.lab.heal.weights import META
from sglang_indexcache.pattern import Group

GB = 1e9


@dataclass(frozen=True)
class GpuMachine:
    """GPUs to plan for.

    Attributes:
        memory: of one GPU, bytes.
        bf16: peak rate of bfloat16 products, FLOP/s.
        float32: the same of float32, in which the loss is computed.
        bandwidth: of a GPU's memory, bytes/s.
        reached: share of the peak rates that is taken to be reached.
        disk: rate at which weights are taken to be read from disk, bytes/s.
    """

    gpus: int
    name: str
    memory: float
    bf16: float
    float32: float
    bandwidth: float
    reached: float = 0.3
    disk: float = 5e9


@dataclass(frozen=True)
class LayerCost:
    """Cost of one layer for a row.

    Attributes:
        peak: most bytes that are alive at a time, weights that stay and state apart.
        waiting: bytes that the row keeps between two layers.
        weights: seconds in which the layer's weights are read and dequantised.
        row: seconds in which the row runs.
    """

    peak: int
    waiting: int
    weights: float
    row: float


@dataclass(frozen=True)
class Share:
    """Work of one GPU.

    Attributes:
        resident: bytes of the layers' weights, indexers and optimiser state.
        working: most bytes beside them, at any moment of a step.
    """

    layers: range
    resident: int
    working: int

    @property
    def peak(self) -> int:
        """Bytes at the fullest moment."""
        return self.resident + self.working


@dataclass(frozen=True)
class HealPlan:
    """The bill; ``busy`` is how many of the GPUs work at a time, on average."""

    shares: tuple[Share, ...]
    hours: float
    busy: float
    quantised: bool

    @property
    def peak(self) -> int:
        """Bytes of the fullest GPU."""
        return max(share.peak for share in self.shares)


Track = Callable[[Sequence[Group]], Iterable[Group]]
"""Progress bar: hands the groups of layers through and shows how far they are."""


def dry_run(
    options: HealOptions, machine: GpuMachine, track: Track = iter
) -> list[tuple[str, str]]:
    """Return what a healing would take, as rows to print, from ``config.json`` and files' heads.

    A large model takes a minute or two, so ``track`` may show the progress of each stage.

    Raises:
        CheckpointError, PatternError, LibraryError, TrainingError: as :func:`heal` would.
    """
    bill = plan_of(options, machine, track)
    rows = describe(bill, machine)
    if bill.peak <= machine.memory:
        idle = not options.from_disk and options.rows < machine.gpus
        more = f"; with --rows {machine.gpus} the GPUs would work at once"
        spare = 1 - bill.peak / machine.memory
        return [
            *rows,
            ("verdict", f"it fits, with {spare:.0%} of the memory to spare{more * idle}"),
        ]
    if options.from_disk:
        return [*rows, ("verdict", "it does not fit: give a shorter --context, or fewer --rows")]
    alone = replace(machine, gpus=1)
    disk = plan_of(replace(options, from_disk=True), alone, track)
    fits = "fits" if disk.peak <= machine.memory else "does not fit either"
    advice = (
        f"it does not fit. With --from-disk it {fits}: one GPU then needs "
        f"{disk.peak / GB:,.0f} GB, and it takes {disk.hours:,.2g} hours, where "
        f"{machine.disk / GB:g} GB are read a second"
    )
    if not bill.quantised:
        advice += ". A block-FP8 checkpoint of the model takes half the memory"
    return [*rows, ("verdict", advice)]


def plan_of(options: HealOptions, machine: GpuMachine, track: Track = iter) -> HealPlan:
    """Return the bill of a healing; see :func:`dry_run`."""
    target = Target.of(options)
    sharing = LocalSharing(target.pattern, target.topk, block=options.block)
    places = [META] * (1 if options.from_disk else machine.gpus)
    dtype = DTYPES[options.dtype]
    body = FrozenBody(options.checkpoint, target.pattern, sharing, dtype, places, options.from_disk)
    at_once = pipelined(body, options.rows)
    total, working, busy = 0.0, [0] * len(body.shares), 0.0
    for number, stage in enumerate(options.stages):
        length = target.lengths[stage.kind]
        costs = _layer_costs(body, sharing, stage, length, machine, track)
        apart = [costs[share.start : share.stop] for share in body.shares]
        for place, share in enumerate(apart):
            # The other rows of the step wait: between two layers, or for their turn.
            waiting = (options.rows - 1) * max((c.waiting for c in share), default=0)
            peaks = max((c.peak for c in share), default=0)
            working[place] = max(working[place], waiting + peaks)
        seconds, work = _step(apart, options.rows, at_once)
        tried = 0 if options.lr or number else len(RATES)  # first some learning rates
        judged = 1 + math.ceil(stage.steps / options.evaluate_every) + tried
        passes = stage.steps + tried * TRIAL_STEPS + judged * options.held_out / options.rows
        total += passes * seconds
        busy += passes * work
    resident = [sum(body.sizes[layer].resident for layer in share) for share in body.shares]
    shares = tuple(map(Share, body.shares, resident, working))
    return HealPlan(shares, total / 3600, busy / total, body.sizes[0].quantised)


def _step(shares: list[list[LayerCost]], rows: int, at_once: bool) -> tuple[float, float]:
    """Return the seconds of a step, and of work on all GPUs in it."""
    if not at_once:
        seconds = sum(c.weights + rows * c.row for share in shares for c in share)
        return seconds, seconds
    seconds_of = [sum(c.weights + c.row for c in share) for share in shares]
    return sum(seconds_of) + (rows - 1) * max(seconds_of), rows * sum(seconds_of)


def _layer_costs(
    body: FrozenBody,
    sharing: LocalSharing,
    stage: HealStage,
    length: int,
    machine: GpuMachine,
    track: Track,
) -> list[LayerCost]:
    """Cost every layer for a row of this length; run groups of the same layers once."""
    costs_of: dict[tuple[str, ...], list[LayerCost]] = {}
    costs: list[LayerCost] = []
    for group in track(sharing.pattern.groups):
        kind = tuple(body.sizes[layer].kind for layer in group.layers)
        if kind not in costs_of:
            costs_of[kind] = list(_group_costs(body, sharing, group.layers, stage, length, machine))
        costs += costs_of[kind]
    return costs


def _group_costs(
    body: FrozenBody,
    sharing: LocalSharing,
    group: Sequence[int],
    stage: HealStage,
    length: int,
    machine: GpuMachine,
) -> Iterator[LayerCost]:
    for number in group:
        body.layer(number)  # what stays in memory is counted as held
    with Meter() as meter:
        ids = torch.zeros((1, length), dtype=torch.int64, device=META)
        layout = SampledLayout(ids, meter=meter)
        row = Passing(sharing.begin(stage.kind, layout, 1.0), *body.start(ids, ids))
        for number in group:
            meter.restart()
            layer = body.layer(number)
            stored = body.sizes[number].stored / machine.disk if body.from_disk else 0.0
            weights = stored + meter.moved / machine.bandwidth
            meter.restart()
            row.through(layer, META, sharing)
            del layer
            rates = {torch.float32: machine.float32}
            seconds = sum(
                flops / (machine.reached * rates.get(dtype, machine.bf16))
                for dtype, flops in meter.flops.items()
            )
            yield LayerCost(meter.peak, meter.alive, weights, seconds)


def counted_gpus(text: str) -> tuple[int, str]:
    """Return the number of GPUs that ``8xh200`` says, and which they are.

    Raises:
        TrainingError: written in another way.
    """
    count, times, name = text.partition("x")
    if not times or not (count.isascii() and count.isdigit()) or not int(count):
        raise TrainingError(f"GPUs are written as 8xh200, got {text!r}")
    return int(count), name


def describe(bill: HealPlan, machine: GpuMachine) -> list[tuple[str, str]]:
    """Make rows to print: each GPU, the hours, and what these rest on."""
    rows = []
    for number, share in enumerate(bill.shares):
        layers = f"layers {share.layers.start} to {share.layers.stop - 1}" if share.layers else "-"
        rows.append(
            (
                f"GPU {number}",
                f"{share.peak / GB:,.1f} of {machine.memory / GB:,.0f} GB: {layers}, "
                f"{share.resident / GB:,.1f} GB of weights and training state, "
                f"{share.working / GB:,.1f} GB of one layer at work and of rows",
            )
        )
    rows.append(
        (
            "hours",
            f"{bill.hours:,.2g}, arithmetic and not measured: {bill.busy:.1f} of {machine.gpus} "
            f"GPUs at work, at {100 * machine.reached:.0f} % of the rates in {machine.name}'s data "
            f"sheet; without copies between GPUs, the optimiser's steps and reading data",
        )
    )
    return rows


@dataclass
class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what a block of torch code takes; also on the meta device.

    Attributes:
        alive: bytes of all tensors that were made and are still there.
        peak: the most of them.
        moved: bytes that operations read and wrote.
        flops: of products, by dtype.
    """

    alive: int = 0
    peak: int = 0
    moved: int = 0
    flops: dict[torch.dtype, float] = field(default_factory=lambda: defaultdict(float))

    def repeat(self, times: float, moved: int, flops: Mapping[torch.dtype, float]) -> None:
        """Count again, ``times`` over, what came since ``moved`` and ``flops`` were read."""
        self.moved += round(times * (self.moved - moved))
        for dtype, total in self.flops.items():
            self.flops[dtype] += times * (total - flops.get(dtype, 0.0))

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: set[int] = set()

    def restart(self) -> None:
        """Count anew; the peak begins at what is alive."""
        self.peak, self.moved = self.alive, 0
        self.flops.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and take note of it."""
        result = func(*args, **(kwargs or {}))
        outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self.moved += sum(t.numel() * t.itemsize for t in (*inputs, *outputs))
        packet = func.overloadpacket
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=result)
            self.flops[outputs[0].dtype] += flops
        elif "grouped_mm" in str(packet):  # each row meets the matrix of one expert
            self.flops[outputs[0].dtype] += 2 * inputs[0].numel() * outputs[0].shape[-1]
        input_storages = {tensor.untyped_storage()._cdata for tensor in inputs}
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if storage._cdata not in input_storages:  # else a view, or written in place
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages or not size:
            return
        self._storages.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._drop, key, size).atexit = False

    def _drop(self, key: int, size: int) -> None:
        self._storages.remove(key)
        self.alive -= size


@dataclass(frozen=True)
class SampledLayout(Layout):
    """One document, of whose sums a few blocks are run: the losses of a large model take minutes.

    A block's work is affine in what it sees, so the first and the last of equally long blocks
    stand for those between them. The one that sees most is always run: it makes the peak.
    """

    meter: Meter | None = None

    def summed(self, size: int) -> Iterator[slice]:
        """Yield the blocks to run; the meter hears of the others."""
        blocks = list(self.blocks(size))
        if self.meter is None or len(blocks) <= 3:
            yield from blocks
            return
        yield blocks[0]  # may be shorter than the others
        moved, flops = self.meter.moved, dict(self.meter.flops)
        yield blocks[1]
        yield blocks[-1]
        self.meter.repeat((len(blocks) - 3) / 2, moved, flops)
