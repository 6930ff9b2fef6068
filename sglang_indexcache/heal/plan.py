"""What healing and full training take, by arithmetic: nothing here is measured.

The arithmetic is a table, :data:`FORMULAS`. What is computed is the very formula that is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from sglang_indexcache.errors import TrainingError

if TYPE_CHECKING:
    from sglang_indexcache.bench.shapes import ModelShape
    from sglang_indexcache.pattern import Pattern

Unit = Literal["parameters", "keys", "FLOP", "bytes", "hours", "GPUs", "steps"]
TITLE = "Arithmetic, not measured"
STEPS = 320
"""Of heal, if nothing else is asked; all dense."""


@dataclass(frozen=True)
class Assumptions:
    """What the config does not say; every one is printed.

    Attributes:
        gpus: that share the model.
        gpu_memory: of one, GB (1e9 bytes).
        million_tokens: that are trained on.
        length: tokens of a row; one row is in work at a time.
        rows: of a step of heal, all of which wait between two layers.
        mfu: share of the peak rates that is reached.
        bf16_tflops: peak rate of bfloat16 products, for the body.
        float32_tflops: the same of float32, in which the distillation loss is computed.
        weight_bytes: of one parameter of the frozen body: 2 for bfloat16, 1 for FP8.
        disk_rate: GB/s (1e9 bytes) at which weights are read from disk.
        dense_share: of heal's tokens, those of the dense warm-up.
        block: queries of the loss that are in work at a time.
    """

    gpus: int = 8
    gpu_memory: float = 141.0
    million_tokens: float = 100.0
    length: int = 32_768
    rows: int = 4
    mfu: float = 0.3
    bf16_tflops: float = 989.0
    float32_tflops: float = 67.0
    weight_bytes: float = 2.0
    disk_rate: float = 5.0
    dense_share: float = 1.0
    block: int = 256

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 0 or (value == 0 and name != "dense_share"):
                raise TrainingError(f"{name} is {value}; it must be above 0")
        for name in ("mfu", "dense_share"):
            if getattr(self, name) > 1:
                raise TrainingError(f"{name} is {getattr(self, name)}; it is a share, at most 1")


@dataclass(frozen=True)
class Formula:
    """One step of the arithmetic.

    Attributes:
        name: what later formulas call the result.
        meaning: for people.
        unit: of the result.
        text: Python, over :class:`Assumptions`, a shape's fields and earlier names.
    """

    name: str
    meaning: str
    unit: Unit
    text: str


FORMULAS: dict[str, tuple[Formula, ...]] = {
    "The model": (
        Formula("moe", "experts of a layer", "parameters",
            "3 * hidden * expert_width * (experts + shared_experts) + hidden * experts"),
        Formula("dense_mlp", "MLP of a layer without experts", "parameters",
            "3 * hidden * dense_width"),
        Formula("model", "all weights but the indexers'", "parameters",
            "layers * attention + moe_layers * moe + dense_layers * dense_mlp"
            " + 2 * vocab * hidden"),
        Formula("active", "used by a token, without embedding and head", "parameters",
            "layers * attention + moe_layers * active_mlp + dense_layers * dense_mlp"),
        Formula("indexers", "indexers of the F layers: what heal trains", "parameters",
            "full_layers * indexer"),
        Formula("visible", "keys that a query sees, on average", "keys", "(length + 1) / 2"),
        Formula("k", "keys selected by a query that sees enough", "keys", "min(topk, length)"),
        Formula("selected", "keys that a query selects, on average", "keys",
            "(k * (k + 1) / 2 + (length - k) * k) / length"),
    ),
    "Products of one token": (
        Formula("body", "forward pass, bfloat16", "FLOP",
            "2 * active + layers * 2 * heads * (nope + rope + v) * visible"),
        Formula("head", "logits, bfloat16 (heal makes none)", "FLOP", "2 * vocab * hidden"),
        Formula("pair", "loss of a query and a key, value and gradient, float32", "FLOP",
            "2 * heads * (nope + rope) + 6 * index_heads * index_dim"),
        Formula("project", "indexers' projections and their gradients, float32", "FLOP",
            "full_layers * 4 * indexer"),
        Formula("dense_loss", "a term of every layer over the visible keys", "FLOP",
            "layers * visible * pair"),
        Formula("sparse_loss", "selection, and a term of every layer over what it chose", "FLOP",
            "full_layers * 2 * index_heads * index_dim * visible + layers * selected * pair"),
    ),
    "Heal, GPU-hours": (
        Formula("heal_body", "forward passes", "hours",
            "million_tokens * 1e6 * body / (mfu * bf16_tflops * 1e12) / 3600"),
        Formula("heal_loss", "indexers and loss", "hours",
            "million_tokens * 1e6 * (project + dense_share * dense_loss"
            " + (1 - dense_share) * sparse_loss) / (mfu * float32_tflops * 1e12) / 3600"),
        Formula("heal", "heal in all", "hours", "heal_body + heal_loss"),
        Formula("heal_wall", "heal, wall time if the GPUs share it evenly", "hours",
            "heal / gpus"),
    ),
    "Full training on as many tokens, sparse stage, GPU-hours": (
        Formula("train_body", "forward, again (checkpointing), backward twice that", "hours",
            "million_tokens * 1e6 * 4 * (body + head) / (mfu * bf16_tflops * 1e12) / 3600"),
        Formula("train_loss", "indexers and loss, twice (checkpointing)", "hours",
            "million_tokens * 1e6 * 2 * (project + sparse_loss)"
            " / (mfu * float32_tflops * 1e12) / 3600"),
        Formula("train", "full training in all", "hours", "train_body + train_loss"),
        Formula("train_wall", "full training, wall time", "hours", "train / gpus"),
    ),
    "Heal, memory of one GPU": (
        Formula("heal_weights", "frozen weights, spread over the GPUs", "bytes",
            "model * weight_bytes / gpus"),
        Formula("heal_layer_weights", "one layer gathered in bfloat16", "bytes",
            "2 * (attention + moe)"),
        Formula("heal_state", "indexers: float32 weights, gradients, two moments", "bytes",
            "16 * indexers"),
        Formula("layer", "activations of one layer: residual, q, k, v, output, experts", "bytes",
            "2 * length * (2 * hidden + heads * 2 * (nope + rope + v)"
            " + active_experts * (2 * hidden + 3 * expert_width))"),
        Formula("index", "an indexer's inputs to the loss, their gradient, the selection", "bytes",
            "length * (8 * (index_heads * index_dim + index_dim + index_heads) + 4 * k)"),
        Formula("loss", "scores of a block of queries, float32, three at a time", "bytes",
            "12 * block * index_heads * length"),
        Formula("waiting", "what all rows of a step keep: residuals, index, rotation", "bytes",
            "rows * (index + 2 * length * (hidden + 2 * rope))"),
        Formula("heal_memory", "heal in all", "bytes",
            "heal_weights + heal_layer_weights + heal_state + waiting + layer + loss"),
    ),
    "Heal from disk (--from-disk), one GPU": (
        Formula("steps", "steps, each of which reads every layer once", "steps",
            "million_tokens * 1e6 / (rows * length)"),
        Formula("disk_read", "read in one step", "bytes",
            "(model - 2 * vocab * hidden) * weight_bytes"),
        Formula("disk_hours", "reading, while nothing is computed", "hours",
            "steps * disk_read / (disk_rate * 1e9) / 3600"),
        Formula("disk_wall", "wall time", "hours", "heal + disk_hours"),
        Formula("disk_memory", "memory: one layer as stored for all weights, and the embedding",
            "bytes",
            "heal_memory - heal_weights + weight_bytes * (attention + moe) + 2 * vocab * hidden"),
    ),
    "Full training, memory of one GPU": (
        Formula("train_state", "float32 weights, gradients, two moments, spread", "bytes",
            "16 * (model + indexers) / gpus"),
        Formula("train_layer_weights", "one layer and its gradient, gathered in float32", "bytes",
            "8 * (attention + moe)"),
        Formula("kept", "every layer's input, kept for the backward pass (float32)", "bytes",
            "4 * layers * length * hidden"),
        Formula("train_memory", "full training in all", "bytes",
            "train_state + train_layer_weights + kept + 2 * layer + index + loss"),
    ),
    "GPUs": (
        Formula("heal_gpus", "fewest GPUs that hold heal", "GPUs",
            "fewest(model * weight_bytes, heal_memory - heal_weights)"),
        Formula("train_gpus", "fewest GPUs that hold full training", "GPUs",
            "fewest(16 * (model + indexers), train_memory - train_state)"),
    ),
}  # fmt: skip
"""Every step, under the headings that it is shown with.

A KL term costs 2 FLOP a multiplication: p is one product over the main attention's key, q three
over the index key (its scores, and the gradients of queries and keys). The body's attention
multiplies every visible key, as this package's does.
"""

LEFT_OUT = (
    "Left out: communication, the optimizer's step, reading data, norms and softmax, the memory "
    "allocator's losses, MTP layers, evaluations (a forward pass each, and from disk one more "
    "reading). One row is in work on each GPU at a time."
)


@dataclass(frozen=True)
class Line:
    """A step and what it came to."""

    formula: Formula
    value: float

    @property
    def shown(self) -> str:
        """The value with its unit."""
        match self.formula.unit:
            case "bytes":
                return f"{self.value / 1e9:,.1f} GB"
            case "parameters":
                return f"{self.value / 1e9:,.3f}B"
            case "FLOP":
                return f"{self.value / 1e9:,.6g} GFLOP"
            case "hours":
                return f"{self.value:,.2f} h"
            case "GPUs":
                return "none" if self.value == float("inf") else f"{self.value:.0f}"
            case _:
                return f"{self.value:,.1f}"


@dataclass(frozen=True)
class TrainingPlan:
    """The arithmetic for one model.

    Attributes:
        sections: the steps, by heading.
    """

    sections: dict[str, tuple[Line, ...]]

    def lines(self) -> Iterator[Line]:
        """Every step."""
        for lines in self.sections.values():
            yield from lines

    def __getitem__(self, name: str) -> float:
        """A step's result."""
        return next(line.value for line in self.lines() if line.formula.name == name)

    def verdicts(self, assumed: Assumptions) -> list[str]:
        """Whether each fits, in a sentence."""
        return [
            self._verdict("Heal", "heal", assumed),
            self._verdict("Full training", "train", assumed),
            self._from_disk(assumed),
        ]

    def _from_disk(self, assumed: Assumptions) -> str:
        needed = f"{self['disk_memory'] / 1e9:,.0f} GB"
        if self["disk_memory"] > assumed.gpu_memory * 1e9:
            return (
                f"Heal from disk does not fit on one GPU: {needed}. Take a shorter context or "
                "fewer rows a step."
            )
        return (
            f"Heal from disk fits on one GPU: {needed}; {self['disk_wall']:,.0f} h, of which "
            f"{self['disk_hours']:,.0f} h read."
        )

    def _verdict(self, what: str, name: str, assumed: Assumptions) -> str:
        needed = f"{self[f'{name}_memory'] / 1e9:,.0f} GB a GPU"
        if self[f"{name}_memory"] <= assumed.gpu_memory * 1e9:
            return (
                f"{what} fits: {needed}, {assumed.gpus} GPUs have {assumed.gpu_memory:g} GB each."
            )
        fewest = self[f"{name}_gpus"]
        if fewest == float("inf"):
            return (
                f"{what} does not fit on any number of such GPUs: {needed}, most of it not shared. "
                "Take a shorter context."
            )
        return (
            f"{what} does not fit: {needed}. It needs {fewest:.0f} such GPUs, or a shorter context."
        )


def plan(shape: ModelShape, pattern: Pattern, assumed: Assumptions) -> TrainingPlan:
    """Go through :data:`FORMULAS`.

    Args:
        shape: of the model.
        pattern: one character for each of its layers.
        assumed: the rest.
    """
    known: dict[str, object] = {
        **asdict(assumed),
        **{name: getattr(shape, name) for name in type(shape).model_fields},
        "attention": shape.attention_parameters,
        "active_mlp": shape.active_mlp_parameters,
        "indexer": shape.indexer_parameters,
        "moe_layers": shape.layers - shape.dense_layers,
        "full_layers": len(pattern.full_layers),
        "min": min,
        "fewest": lambda shared, own: fewest_gpus(shared, own, assumed.gpu_memory * 1e9),
    }
    sections: dict[str, tuple[Line, ...]] = {}
    for heading, formulas in FORMULAS.items():
        sections[heading] = tuple(_lines(formulas, known))
    return TrainingPlan(sections)


def _lines(formulas: Sequence[Formula], known: dict[str, object]) -> Iterator[Line]:
    for formula in formulas:
        value = eval(formula.text, {"__builtins__": {}}, known)  # of the table above, not a user's
        known[formula.name] = value
        yield Line(formula, float(value))


def fewest_gpus(shared: float, own: float, memory: float) -> float:
    """How many GPUs hold bytes that they share and bytes that each needs; infinity if none do.

    Args:
        shared: spread evenly.
        own: on every GPU.
        memory: of one GPU.
    """
    room = memory - own
    return float("inf") if room <= 0 else float(-(-shared // room))
