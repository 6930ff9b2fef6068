"""Healing of a pattern: train the indexers that it keeps, on a frozen model.

A step runs some packed rows through the body, layer by layer. Every loss is backpropagated within
its own layer (``LocalSharing`` in `forward_state`), so only the indexers have gradients and
optimiser state. In the dense warm-up, layers attend to everything, and an indexer learns the
attention of all layers that it serves. In the sparse stage, layers attend to the indexer's
selection, and the indexer learns the attention among those keys (paper section "Training-Aware
IndexCache").
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from transformers import AutoTokenizer

from sglang_indexcache.checkpoint import Checkpoint, fp8_blocks, reading
from sglang_indexcache.errors import TrainingError
from sglang_indexcache.lab.data.documents import what_is_left_out
from sglang_indexcache.lab.data.marking import Marker
from sglang_indexcache.lab.data.packed import FileRows, PackedRow
from sglang_indexcache.lab.heal import STEPS
from sglang_indexcache.lab.heal.forward_state import ForwardState, LocalSharing, Stage
from sglang_indexcache.lab.heal.frozen import FrozenBody, Passing, pass_through
from sglang_indexcache.lab.heal.losses import DEFAULT_BLOCK
from sglang_indexcache.lab.heal.optimizer import BETAS, adamw_groups, lr_factor, set_lr
from sglang_indexcache.lab.heal.packing import Layout, PackedBatch
from sglang_indexcache.lab.heal.run_folder import (
    HealRun,
    HeldOutEvaluation,
    Position,
    State,
    Tensors,
    learned,
)
from sglang_indexcache.lab.runs.progress import time_in_words
from sglang_indexcache.lab.runs.provenance import versions
from sglang_indexcache.library.digest import checkpoint_digest
from sglang_indexcache.library.resolve import Library
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.adapters.folder import Adapter
from sglang_indexcache.serving.adapters.writing import write_adapter

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
RATES = (5e-3, 1e-3, 2e-4)
"""Learning rates to try: the rate from the study in docs/heal.md, and lower ones, because a larger
indexer with longer training may need a lower rate."""
WARMUP, FINAL_LR, WEIGHT_DECAY = 0.1, 0.1, 0.01
"""Share of a stage's steps in which the learning rate rises, share of the peak to which a cosine
then falls, and AdamW's weight decay for matrices."""
TRIAL_STEPS = 12
"""Number of steps in each trial."""
SHOWN_EVERY = 10
"""Number of steps between lines on the console; the file has every step."""


class NotFiniteError(TrainingError):
    """The loss is infinite or not a number."""


OnStep = Callable[[int, Callable[[], Tensors]], None]
"""Function called after each step, with the number of steps done and a function that returns the
adapter's tensors."""


@dataclass(frozen=True)
class HealOptions:
    """Options of ``indexcache heal run``.

    Attributes:
        output: folder of the adapter; next to it ``<output>.run`` holds state and log.
        length: number of tokens in a row; eight times the model's index_topk if None.
        sparse_length: the same for the sparse stage; as in the dense warm-up if None.
        rows: number of rows in a step.
        lr: peak learning rate; None tries :data:`RATES` first and takes the best.
        clip: largest gradient norm.
        block: number of queries per block of chunked work.

    Raises:
        TrainingError: there is nothing to do, or the dtype is unknown.
    """

    checkpoint: Path
    pattern: str
    data: tuple[str, ...]
    output: Path
    length: int | None = None
    sparse_length: int | None = None
    rows: int = 1
    dense_steps: int = STEPS
    sparse_steps: int = 0
    lr: float | None = None
    clip: float = 1.0
    held_out: int = 8
    evaluate_every: int = 40
    save_every: int = 10
    seed: int = 0
    dtype: str = "bfloat16"
    from_disk: bool = False
    block: int = DEFAULT_BLOCK

    def __post_init__(self) -> None:
        if min(self.dense_steps, self.sparse_steps) < 0 or not any(s.steps for s in self.stages):
            raise TrainingError("there is nothing to do: ask for dense or for sparse steps")
        if self.dtype not in DTYPES:
            raise TrainingError(f"the body's dtype is {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise TrainingError(f"a learning rate is above 0, got {self.lr:g} (--lr)")
        for name in ("rows", "held_out", "evaluate_every", "save_every", "block"):
            if getattr(self, name) < 1:
                raise TrainingError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def stages(self) -> tuple[HealStage, ...]:
        """Stages with at least one step, in order."""
        kinds = {Stage.WARMUP: self.dense_steps, Stage.SPARSE: self.sparse_steps}
        return tuple(HealStage(kind, steps) for kind, steps in kinds.items() if steps)


@dataclass(frozen=True)
class HealStage:
    """One stage, ``WARMUP`` or ``SPARSE``, with its optimiser steps."""

    kind: Stage
    steps: int

    def lr_factor(self, step: int) -> float:
        """Return the share of the peak learning rate at a step."""
        return lr_factor(step, self.steps, round(self.steps * WARMUP), FINAL_LR)

    @property
    def attention(self) -> str:
        """Description of the attention in this stage's layers."""
        return "dense" if self.kind is Stage.WARMUP else "sparse"


@dataclass(frozen=True)
class HealResult:
    """The adapter, and its evaluations on held-out rows; the first is before any training."""

    adapter: Adapter
    evaluations: tuple[HeldOutEvaluation, ...]


def heal(
    options: HealOptions, console: Console | None = None, on_step: OnStep | None = None
) -> HealResult:
    """Train an adapter, or continue an interrupted run with the same options.

    Raises:
        CheckpointError: the folder is no DSA checkpoint, or its weights have an unknown form.
        PatternError, LibraryError: the pattern is malformed or unknown, or needs indexers that the
            checkpoint lacks.
        DataError: a file cannot be read.
        TrainingError: there is too little data, rows are too short, or the output holds something
            else or is in use.
        OutputError: the disk is full; afterwards the same options continue the run.
    """
    healing = _Healing(options, console or Console(), on_step)
    with healing.claimed():
        return healing.run()


@dataclass(frozen=True)
class Target:
    """Options applied to their checkpoint; ``lengths`` has the tokens of a row by stage."""

    pattern: Pattern
    topk: int
    lengths: dict[Stage, int]

    @classmethod
    def of(cls, options: HealOptions) -> Target:
        """Read the checkpoint's config.

        Raises:
            CheckpointError, PatternError, LibraryError, TrainingError: as for :func:`heal`.
        """
        checkpoint = Checkpoint.read(options.checkpoint)
        checkpoint.check_trained(str(options.checkpoint))
        fp8_blocks(options.checkpoint)
        pattern = Library.default().resolve(options.pattern, checkpoint).pattern
        pattern.check_checkpoint(checkpoint.own)
        topk = int(checkpoint.shape["index_topk"])
        length = options.length or 8 * topk
        lengths = {Stage.WARMUP: length, Stage.SPARSE: options.sparse_length or length}
        target = cls(pattern, topk, {stage.kind: lengths[stage.kind] for stage in options.stages})
        shortest = min(target.lengths.values())
        if shortest <= topk:
            raise TrainingError(
                f"rows of {shortest} tokens are no longer than index_topk ({topk}): every "
                f"query attends to all that it sees, so nothing can be learned of selecting. Give "
                f"longer rows, for instance {8 * topk} tokens."
            )
        return target


class _Sums:
    """Sums over the rows of a step or an evaluation, by layer, in float64 on the CPU."""

    def __init__(self, layers: int) -> None:
        self.all = torch.zeros(3, layers, dtype=torch.float64)
        self.loss, self.mass, self.choosing = self.all

    def add(self, run: ForwardState) -> None:
        for layer, loss in run.losses.items():
            self.loss[layer] += loss.item()
        for layer, (mass, queries) in run.captured.items():
            self.mass[layer] += mass.item()
            self.choosing[layer] += queries.item()


class _Healing:
    """One run. Everything that can be refused is refused before weights are read."""

    def __init__(self, options: HealOptions, console: Console, on_step: OnStep | None) -> None:
        self.options, self.on_step = options, on_step
        self.target = Target.of(options)
        self.pattern, self.topk = self.target.pattern, self.target.topk
        self.base = checkpoint_digest(options.checkpoint)
        self.files = HealRun(options.output, console)

    def claimed(self) -> AbstractContextManager[None]:
        """Read the data, and lock the run's folder for this process alone."""
        self.data = {length: self._read(length) for length in set(self.target.lengths.values())}
        digests = {
            "digest of the checkpoint's files": self.base,
            "digest of the data": {str(length): each.digest for length, each in self.data.items()},
        }
        return self.files.claimed(self._identity_options() | digests)

    def run(self) -> HealResult:
        """Train to the end of the last stage."""
        adapter = self.files.finished()
        if adapter is not None:
            self.files.log.say(f"{self.options.output} is finished already")
            return HealResult(adapter, self.files.evaluations())
        self._load()
        state = self.files.load()
        self._announce(state)
        self.lr = self.options.lr or (self._best_rate() if state is None else state.lr)
        for number, stage in enumerate(self.options.stages):
            resumed = state if state is not None and state.position.stage == number else None
            if state is None or number >= state.position.stage:
                self._stage(number, stage, resumed)
        return self._finish()

    def _identity_options(self) -> dict[str, Any]:
        """Return the options that affect what is learned, as JSON values."""
        no_difference = ("checkpoint", "output", "save_every", "from_disk")
        changing = {k: v for k, v in vars(self.options).items() if k not in no_difference}
        return changing | {"pattern": str(self.pattern), "data": list(self.options.data)}

    def _read(self, length: int) -> FileRows:
        """Read rows of this length, for the stages that use it."""
        options = self.options
        with reading(f"the tokenizer of {options.checkpoint}"):
            tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
        end = tokenizer.eos_token_id
        self.padding = next(i for i in (tokenizer.pad_token_id, end, 0) if i is not None)
        marker = Marker(tokenizer, options.checkpoint.name)
        count = self._steps_of(length) * options.rows
        data = FileRows.read(options.data, marker, length, count, options.held_out, options.seed)
        for part, rows in (("train", data.train), ("judge", data.held_out)):
            if max(len(piece) for row in rows for piece in row) <= self.target.topk:
                raise TrainingError(
                    f"no document to {part} by has more tokens than index_topk "
                    f"({self.target.topk}), so no query has to choose. Give longer documents."
                )
        return data

    def _steps_of(self, length: int, stages: int | None = None) -> int:
        """Count the steps with rows of this length in the first ``stages`` stages (all if None)."""
        lengths = self.target.lengths
        first = self.options.stages[:stages]
        return sum(stage.steps for stage in first if lengths[stage.kind] == length)

    def _load(self) -> None:
        options = self.options
        self.sharing = LocalSharing(self.pattern, self.topk, block=options.block)
        self.body = FrozenBody(
            options.checkpoint,
            self.pattern,
            self.sharing,
            DTYPES[options.dtype],
            _devices(),
            options.from_disk,
        )
        self.trained = self.body.indexer_tensors()

    def _announce(self, state: State | None) -> None:
        options, say = self.options, self.files.log.say
        say(f"pattern {self.pattern}: {self.pattern.summary()}")
        count = sum(p.numel() for p in self.trained.values())
        say(f"training {count:,} parameters of {len(self.body.indexers)} indexers")
        for length, data in self.data.items():
            draws = self._steps_of(length) * options.rows / len(data.train)
            say(
                f"{len(data.train)} rows of up to {length} tokens, each drawn about "
                f"{draws:.1f} times, and {len(data.held_out)} held out"
            )
        for source in options.data:
            if left_out := what_is_left_out(source):
                say(f"{source}: {left_out}")
        if state is not None:
            say(f"resumed after step {state.position.step} of stage {state.position.stage}")

    def _best_rate(self) -> float:
        """Return the learning rate whose short run ends with the lowest held-out loss."""
        first, losses, say = self.options.stages[0], dict[float, float](), self.files.log.say
        stage = replace(first, steps=TRIAL_STEPS)
        initial = self._masters()
        for rate in RATES:
            try:
                losses[rate] = self._tried(rate, stage)
            except NotFiniteError:
                if rate == RATES[-1] and not losses:
                    raise
            self._set(initial)
            say(
                f"learning rate {rate:g}, {stage.steps} steps: held-out loss "
                f"{losses.get(rate, math.inf):.4g}"
            )
        best = min(losses, key=lambda rate: losses[rate])
        say(f"taking a learning rate of {best:g}")
        return best

    def _tried(self, rate: float, stage: HealStage) -> float:
        """Return the held-out loss after a short trial stage with this learning rate."""
        optimizer = self._optimizer(rate)
        optimizer.zero_grad()  # the previous rate may have failed in the middle of a step
        for step in range(stage.steps):
            set_lr([optimizer], stage.lr_factor(step))
            self._step(0, step, stage, optimizer)
        return sum(self._measure(stage.kind)[0])

    def _stage(self, number: int, stage: HealStage, state: State | None) -> None:
        optimizer = self._optimizer(self.lr)
        if state is None:
            state = State(Position(number, 0), lr=self.lr)
            self._judge(number, 0, stage, state)
        else:
            self._set(state.indexers)
            optimizer.load_state_dict(state.optimizer)
        began, start = time.perf_counter(), state.position.step
        for step in range(start, stage.steps):
            set_lr([optimizer], stage.lr_factor(step))
            line = self._step(number, step, stage, optimizer)
            finished = step + 1
            seconds = time.perf_counter() - began
            remaining = seconds / (finished - start) * (stage.steps - finished)
            last = finished == stage.steps
            times = {"seconds": seconds, "seconds_left": remaining}
            line |= self._where(number, finished, stage) | times
            self.files.log.record(**line)
            if last or finished % SHOWN_EVERY == 0:
                self.files.log.say(
                    f"{stage.attention} attention, step {finished} of {stage.steps}: "
                    f"loss {line['loss']:.4g}, {time_in_words(remaining / 3600)} left"
                )
            if last or finished % self.options.evaluate_every == 0:
                self._judge(number, finished, stage, state)
            if last or finished % self.options.save_every == 0:
                self._save(Position(number, finished), state, optimizer)
            if self.on_step is not None:
                self.on_step(self._before(number) + finished, self._tensors)
        self._set(state.best)

    def _before(self, number: int) -> int:
        return sum(stage.steps for stage in self.options.stages[:number])

    def _where(self, number: int, step: int, stage: HealStage) -> dict[str, Any]:
        return {
            "stage": number,
            "step": step,
            "kind": stage.attention,
            "total_step": self._before(number) + step,
        }

    def _optimizer(self, lr: float) -> torch.optim.Optimizer:
        groups = adamw_groups(list(self.trained.values()), lr, WEIGHT_DECAY)
        return torch.optim.AdamW(groups, betas=BETAS)

    def _step(
        self, number: int, step: int, stage: HealStage, optimizer: torch.optim.Optimizer
    ) -> dict[str, Any]:
        length = self.target.lengths[stage.kind]
        first = (self._steps_of(length, number) + step) * self.options.rows
        rows = [self.data[length].drawn(first + row) for row in range(self.options.rows)]
        sums, queries = self._forward(rows, stage.kind)
        norm = nn.utils.clip_grad_norm_(list(self.trained.values()), self.options.clip)
        optimizer.step()
        optimizer.zero_grad()
        by_layer = (sums.loss / queries).tolist()
        return {
            "loss": sum(by_layer),
            "indexer_norm": float(norm),
            "lr": optimizer.param_groups[0]["lr"],
            "loss_by_layer": by_layer,
        }

    def _forward(self, rows: list[PackedRow], kind: Stage) -> tuple[_Sums, int]:
        """Run rows through all layers; with gradients enabled, add up the indexers' gradients."""
        queries = sum(len(piece) for row in rows for piece in row)
        sums = _Sums(len(self.pattern))
        # An evaluation may have many rows, so only as many as in a step wait between two layers.
        for first in range(0, len(rows), self.options.rows):
            passing = [
                Passing(
                    ForwardState(kind, Layout(batch.documents), queries),
                    *self.body.start(batch.ids, batch.positions),
                )
                for row in rows[first : first + self.options.rows]
                for batch in [PackedBatch.of([row], self.target.lengths[kind], self.padding)]
            ]
            pass_through(self.body, self.sharing, passing)
            for part in passing:
                sums.add(part.run)
        if not sums.loss.isfinite().all():
            raise NotFiniteError(
                "the distillation loss is not finite any more. Lower the learning rate; if it was "
                "so from the first step, the checkpoint's weights are damaged."
            )
        return sums, queries

    @torch.no_grad()
    def _measure(self, kind: Stage) -> tuple[list[float], list[float]]:
        """Measure every layer's loss and recall on the held-out rows."""
        sums, queries = self._forward(list(self.data[self.target.lengths[kind]].held_out), kind)
        return (sums.loss / queries).tolist(), (sums.mass / sums.choosing).tolist()

    def _judge(self, number: int, step: int, stage: HealStage, state: State) -> None:
        """Evaluate on the held-out rows, and keep the weights if they are the best so far."""
        loss, recall = self._measure(stage.kind)
        evaluation = HeldOutEvaluation(
            **self._where(number, step, stage),
            held_out_loss=sum(loss),
            held_out_recall=sum(recall) / len(recall),
            held_out_loss_by_layer=loss,
            held_out_recall_by_layer=recall,
        )
        self.files.log.record(**vars(evaluation))
        self.files.log.say(str(evaluation))
        state.judged(evaluation.held_out_loss, self._masters)

    def _masters(self) -> Tensors:
        return {name: p.detach().cpu().clone() for name, p in self.trained.items()}

    def _tensors(self) -> Tensors:
        """Return the adapter's tensors, which are the indexers in the checkpoint's dtypes."""
        plain = self.body.plain_dtype
        return {name: tensor.to(plain(name)) for name, tensor in self._masters().items()}

    @torch.no_grad()
    def _set(self, masters: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self.trained.items():
            parameter.copy_(masters[name])

    def _save(self, position: Position, state: State, optimizer: torch.optim.Optimizer) -> None:
        self._check_base()
        state.position = position
        state.indexers, state.optimizer = self._masters(), optimizer.state_dict()
        self.files.save(state)

    def _check_base(self) -> None:
        """Refuse a checkpoint that has changed: an adapter must name the one it was trained on."""
        if checkpoint_digest(self.options.checkpoint) != self.base:
            raise TrainingError(
                f"the files of {self.options.checkpoint} are others than when this run began, so "
                "what was learned since belongs to none of them. Put the first ones back and give "
                "the same command, or begin anew with another --output."
            )

    def _finish(self) -> HealResult:
        self._check_base()
        evaluations, output = self.files.evaluations(), self.options.output
        write_adapter(
            output,
            pattern=self.pattern,
            checkpoint=self.options.checkpoint,
            tensors=self._tensors(),
            record=self._record(evaluations),
        )
        for sentence in learned(evaluations):
            self.files.log.say(sentence)
        self.files.log.say(f"wrote {output}; serve it: --indexcache-adapter {output}")
        return HealResult(Adapter.read(output), evaluations)

    def _record(self, evaluations: tuple[HeldOutEvaluation, ...]) -> dict[str, Any]:
        lengths = self.target.lengths
        return {
            "made_by": "indexcache heal run",
            "options": {**self._identity_options(), "lr": self.lr},
            "lengths": {stage.attention: lengths[stage.kind] for stage in self.options.stages},
            "data_digests": {length: data.digest for length, data in self.data.items()},
            "evaluations": [
                {k: v for k, v in vars(e).items() if not isinstance(v, list)} for e in evaluations
            ],
            "versions": versions(),
        }


def _devices() -> list[torch.device]:
    """Return all GPUs of the machine, or its CPU if it has none."""
    gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    return gpus or [torch.device("cpu")]
