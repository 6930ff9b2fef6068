"""Estimate of what a healing takes, before it begins: arithmetic on the fields of ``config.json``.

Bytes and products are those of the code that heals, as far as they grow with a layer's weights or
with a row's length; a test holds the bytes against a run's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import AutoConfig

from sglang_indexcache.checkpoint import fp8_blocks, reading
from sglang_indexcache.errors import TrainingError
from sglang_indexcache.lab.heal.frozen import STATE_COPIES, shared_out
from sglang_indexcache.lab.heal.heal import DTYPES, RATES, TRIAL_STEPS, HealOptions, Target
from sglang_indexcache.lab.heal.local import pipelined
from sglang_indexcache.lab.heal.losses import GATHERED_FROM
from sglang_indexcache.lab.heal.sharing import Stage
from sglang_indexcache.library.sizes import ModelShape
from sglang_indexcache.pattern import Pattern

GB = 1e9
MASTER = 4
"""Bytes of a number in indexers and losses, which compute in float32."""
DEQUANTISED = 75
"""Bytes that are read and written for each parameter in block FP8, until it is a plain one."""


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


def dry_run(options: HealOptions, machine: GpuMachine) -> list[tuple[str, str]]:
    """Return what a healing would take, as rows to print, from ``config.json`` alone.

    Raises:
        CheckpointError, PatternError, LibraryError, TrainingError: as :func:`heal` would.
    """
    bill = plan_of(options, machine)
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
    disk = plan_of(replace(options, from_disk=True), replace(machine, gpus=1))
    fits = "fits" if disk.peak <= machine.memory else "does not fit either"
    advice = (
        f"it does not fit. With --from-disk it {fits}: one GPU then needs "
        f"{disk.peak / GB:,.0f} GB, and it takes {disk.hours:,.2g} hours, where "
        f"{machine.disk / GB:g} GB are read a second"
    )
    if not bill.quantised:
        advice += ". A block-FP8 checkpoint of the model takes half the memory"
    return [*rows, ("verdict", advice)]


def plan_of(options: HealOptions, machine: GpuMachine) -> HealPlan:
    """Return the bill of a healing; see :func:`dry_run`."""
    target = Target.of(options)
    with reading(f"the config of {options.checkpoint}"):
        config = AutoConfig.from_pretrained(options.checkpoint)
    shape = ModelShape.from_config(config)
    if shape is None:
        raise TrainingError(
            f"the config of {options.checkpoint} lacks dimensions that a dry run counts with; "
            "heal without --dry-run"
        )
    quantised = fp8_blocks(options.checkpoint) is not None
    numbers = range(len(target.pattern))
    layers = [_Layer(shape, target.pattern, number, options, quantised) for number in numbers]
    gpus = 1 if options.from_disk else machine.gpus
    shares = shared_out(target.pattern, [layer.resident for layer in layers], gpus)
    apart = [layers[share.start : share.stop] for share in shares]
    at_once = pipelined(shares, options.rows, options.from_disk)
    total, working, busy = 0.0, [0] * gpus, 0.0
    for number, stage in enumerate(options.stages):
        length, sparse = target.lengths[stage.kind], stage.kind is Stage.SPARSE
        for place, share in enumerate(apart):
            # The other rows of the step wait: between two layers, or for their turn.
            waiting = max((layer.waiting(length, sparse) for layer in share), default=0)
            peaks = max((layer.peak(length, sparse) for layer in share), default=0)
            working[place] = max(working[place], (options.rows - 1) * waiting + peaks)
        times = [[layer.seconds(length, sparse, machine) for layer in share] for share in apart]
        seconds, work = _step(times, options.rows, at_once)
        tried = 0 if options.lr or number else len(RATES)  # first some learning rates
        judged = 1 + math.ceil(stage.steps / options.evaluate_every) + tried
        passes = stage.steps + tried * TRIAL_STEPS + judged * options.held_out / options.rows
        total += passes * seconds
        busy += passes * work
    resident = [sum(layer.resident for layer in share) for share in apart]
    return HealPlan(
        tuple(map(Share, shares, resident, working)), total / 3600, busy / total, quantised
    )


def _step(
    shares: Sequence[Sequence[tuple[float, float]]], rows: int, at_once: bool
) -> tuple[float, float]:
    """Return the seconds of a step, and of work on all GPUs in it.

    Args:
        shares: of each GPU's layers the seconds for its weights, and those for a row.
    """
    if not at_once:
        seconds = sum(weights + rows * row for share in shares for weights, row in share)
        return seconds, seconds
    seconds_of = [sum(weights + row for weights, row in share) for share in shares]
    return sum(seconds_of) + (rows - 1) * max(seconds_of), rows * sum(seconds_of)


@dataclass(frozen=True)
class _Layer:
    """A layer's cost; bytes are those of the tensors that :mod:`.local` and transformers hold."""

    shape: ModelShape
    pattern: Pattern
    number: int
    options: HealOptions
    quantised: bool

    @property
    def is_full(self) -> bool:
        return self.pattern.is_full(self.number)

    @property
    def is_last(self) -> bool:
        """Whether no later layer needs what its F layer's indexer computed."""
        return self.number + 1 == len(self.pattern) or self.pattern.is_full(self.number + 1)

    @property
    def is_dense(self) -> bool:
        return self.number < self.shape.first_k_dense_replace

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the body."""
        return DTYPES[self.options.dtype].itemsize

    @property
    def parameters(self) -> int:
        """Parameters of the body's layer."""
        return self.shape.attention_parameters + self.shape.mlp_parameters_of(self.number)

    @property
    def resident(self) -> int:
        """Bytes for good: weights, the embedding before the first layer, training state."""
        size = 1 if self.quantised else self.itemsize
        resident = 0 if self.options.from_disk else size * self.parameters
        if self.number == 0:
            resident += self.itemsize * self.shape.vocab_size * self.shape.hidden_size
        return resident + STATE_COPIES * MASTER * self.shape.indexer_parameters * self.is_full

    def waiting(self, length: int, sparse: bool) -> int:
        """Count bytes that a row keeps after this layer: its state, an indexer's for later ones."""
        return length * (self.itemsize * self.shape.hidden_size + self._kept(sparse))

    def peak(self, length: int, sparse: bool) -> int:
        """Count the most bytes that a row's pass makes be alive, and weights that do not stay."""
        weights = self.quantised or self.options.from_disk
        selected = MASTER * self.shape.index_topk * sparse
        moments = [selected + self._attention(), self._mlp(sparse)]
        if self.is_full and sparse:
            moments.append(self._selecting())
        if not (sparse and self._gathers(length)):
            moments.append(selected + self._losing())
        if self.is_last:
            moments.append(selected + self._learning())
        return length * max(moments) + self.itemsize * self.parameters * weights

    def _gathers(self, length: int) -> bool:
        return GATHERED_FROM * self.shape.index_topk <= length

    # Bytes of one token, by the moment at which they are alive. Attention is taken to be a fused
    # kernel's, without a matrix of queries and keys.

    def _held(self, copies: int) -> int:
        """Count what an indexer projects, ``copies`` times (gradients too), and from what."""
        s = self.shape
        projected = s.index_n_heads * (s.index_head_dim + 1) + s.index_head_dim
        inputs = s.hidden_size + s.q_lora_rank + 2 * s.qk_rope_head_dim
        return MASTER * (copies * projected + inputs)

    def _kept(self, sparse: bool) -> int:
        """Count what later layers need beside the row's state: a rotation, an indexer's work."""
        s = self.shape
        if self.is_last:
            return MASTER * s.qk_rope_head_dim
        return self._held(2) + MASTER * s.index_topk * sparse

    def _inputs(self) -> int:
        """Count what attention and indexer compute from, and hold."""
        s = self.shape
        held = self._held(1 if self.is_full else 2)
        return held + self.itemsize * (2 * s.hidden_size + s.q_lora_rank + 2 * s.kv_lora_rank)

    def _heads(self, keys: int, values: int) -> int:
        """Count copies of the main attention's queries or keys, and of its values or outputs."""
        s = self.shape
        width = keys * (s.qk_nope_head_dim + s.qk_rope_head_dim) + values * s.v_head_dim
        return self.itemsize * s.num_attention_heads * width

    def _selecting(self) -> int:
        scores = 2 * MASTER * self.options.block * self.shape.index_n_heads
        return self._inputs() + self._heads(4, 1) + scores

    def _attention(self) -> int:
        return self._inputs() + self._heads(4, 3)

    def _losing(self) -> int:
        s = self.shape
        scores = 3 * MASTER * self.options.block * s.index_n_heads
        gradients = MASTER * s.index_n_heads * (s.index_head_dim + 1)
        return self._inputs() + self._heads(4, 2) + scores + gradients

    def _learning(self) -> int:
        """Count a gradient's way back through the indexer."""
        s = self.shape
        backward = 5 * MASTER * s.index_n_heads * s.index_head_dim
        return self._inputs() + self._heads(4, 2) + backward

    def _mlp(self, sparse: bool) -> int:
        s = self.shape
        hidden, inner = s.hidden_size, s.moe_intermediate_size
        size = self.itemsize
        summed, inside = 2 * (size + MASTER) * hidden, size * (hidden + 4 * inner)
        experts = s.num_experts_per_tok * max(summed, inside)
        widest = 3 * size * s.intermediate_size if self.is_dense else experts
        return 3 * size * hidden + widest + self._kept(sparse)

    def seconds(self, length: int, sparse: bool, machine: GpuMachine) -> tuple[float, float]:
        """Return the seconds in which the weights are read and dequantised, and a row runs."""
        s, size = self.shape, 1 if self.quantised else self.itemsize
        weights = size * self.parameters / machine.disk if self.options.from_disk else 0.0
        if self.quantised:
            weights += DEQUANTISED * self.parameters / machine.bandwidth
        experts = s.num_experts_per_tok + s.n_shared_experts
        inner = s.intermediate_size if self.is_dense else s.moe_intermediate_size * experts
        pairs = length * (length + self.options.block) / 2  # of queries and keys, by blocks
        width = s.qk_nope_head_dim + s.qk_rope_head_dim
        body: float = length * (s.attention_parameters + 3 * s.hidden_size * inner)
        body += pairs * s.num_attention_heads * (width + s.v_head_dim)
        scored = s.index_n_heads * (s.index_head_dim + 1)
        indexer = 3.0 * length * s.indexer_parameters * self.is_full  # forward, and two backward
        indexer += pairs * scored * (self.is_full and sparse)
        learned = length * s.index_topk if sparse and self._gathers(length) else pairs
        indexer += learned * (3 * scored + s.num_attention_heads * width)
        rates = {2: machine.bf16, 4: machine.float32}
        row = 2 * (body / rates[self.itemsize] + indexer / machine.float32) / machine.reached
        return weights, row


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
