"""Folder next to an adapter, with the state and log of the run that makes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from sglang_indexcache.errors import TrainingError
from sglang_indexcache.lab.runs.identity import check_writable, claim, locked
from sglang_indexcache.library.writing import replacing, write_whole, writing
from sglang_indexcache.serving.adapters.folder import ADAPTER_FILE, Adapter

OPTIONS, STATE, METRICS, LOCK = "options.json", "state.pt", "metrics.jsonl", "lock"

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, order=True)
class Position:
    """Position in a run: ``step`` steps of stage number ``stage`` are done."""

    stage: int
    step: int


@dataclass
class State:
    """State of a run, with everything that is needed to continue it bit for bit.

    Only the order of rows is random, and it follows from the seed and the step.

    Attributes:
        indexers: float32 weights by name.
        best: the weights with this stage's lowest held-out loss, which is ``best_loss``.
        lr: peak learning rate.
    """

    position: Position
    indexers: Tensors = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    best: Tensors = field(default_factory=dict)
    best_loss: float = float("inf")
    lr: float = 0.0

    def judged(self, loss: float, weights: Callable[[], Tensors]) -> None:
        """Keep the weights of an evaluation if its loss is the lowest so far."""
        if loss < self.best_loss:
            self.best_loss, self.best = loss, weights()


@dataclass(frozen=True)
class HeldOutEvaluation:
    """Evaluation on the held-out rows.

    Attributes:
        step: number of the stage's steps done by then.
        kind: "dense" or "sparse": the keys that layers attended to, and over which the loss is
            taken.
        total_step: number of steps done in the whole run.
        held_out_loss: KL divergence in nats per query, summed over layers, each weighted by one
            over the number of layers that its indexer serves.
        held_out_recall: attention mass on the selected keys, of queries that see more keys; mean
            over layers.
    """

    stage: int
    step: int
    kind: str
    total_step: int
    held_out_loss: float
    held_out_recall: float
    held_out_loss_by_layer: list[float]
    held_out_recall_by_layer: list[float]

    def __str__(self) -> str:
        return (
            f"{self.kind} attention, step {self.step}: held-out loss {self.held_out_loss:.4g}, "
            f"recall {100 * self.held_out_recall:.1f} %"
        )


class HealRun:
    """Folder of a run, and the adapter that the run produces.

    Args:
        output: the adapter's folder; the run's folder is ``<output>.run``.
    """

    def __init__(self, output: Path, console: Console) -> None:
        self.output = output
        self.folder = output.with_name(f"{output.name}.run")
        self.log = RunLog(self.folder, console)

    @contextmanager
    def claimed(self, options: Mapping[str, Any]) -> Iterator[None]:
        """Lock the folder for this run alone while the block runs.

        Raises:
            TrainingError: the folder belongs to another run, is in use, or lacks its options; or
                the output holds something that no run made.
            OutputError: the folder cannot be written.
        """
        path = self.folder / OPTIONS
        if not path.exists() and self.output.exists() and any(self.output.iterdir()):
            raise TrainingError(
                f"{self.output} holds something else already. Give another --output."
            )
        if not path.exists() and (self.folder / STATE).exists():
            raise TrainingError(
                f"{self.folder} has a state and no {OPTIONS}, so nobody can tell what the state "
                "is of. Give another --output."
            )
        check_writable(self.folder)
        with locked(self.folder / LOCK, "healing", TrainingError):
            claim(path, options, "healing", TrainingError)
            yield

    def finished(self) -> Adapter | None:
        """Return the adapter if it was written, else None."""
        return Adapter.read(self.output) if (self.output / ADAPTER_FILE).exists() else None

    def load(self) -> State | None:
        """Load the newest state, and drop later lines of the log.

        Raises:
            TrainingError: the state cannot be read.
        """
        path = self.folder / STATE
        if not path.exists():
            self.log.rewind(Position(-1, 0))
            return None
        # We wrote the file ourselves; it is loaded as tensors and plain values only.
        try:
            values = torch.load(path, map_location="cpu", weights_only=True)
            state = State(**{**values, "position": Position(*values["position"])})
        except Exception as error:  # torch's readers may raise any error
            raise TrainingError(
                f"{path} is damaged, or another version's. Give another --output, or move it away "
                "to begin again."
            ) from error
        if not self.log.path.exists():
            self.log.say(f"{self.log.path} is gone: the adapter's record will begin here")
        self.log.rewind(state.position)
        return state

    def save(self, state: State) -> None:
        """Replace the state in one step.

        Raises:
            OutputError: the state cannot be written; the previous state stays whole.
        """
        values = {f.name: getattr(state, f.name) for f in fields(state)}
        values["position"] = (state.position.stage, state.position.step)
        with replacing(self.folder / STATE, RuntimeError) as part:  # raised by torch's zip writer
            torch.save(values, part)

    def evaluations(self) -> tuple[HeldOutEvaluation, ...]:
        """Return the evaluations in the log."""
        lines = read_metrics(self.folder) if (self.folder / METRICS).exists() else []
        return tuple(HeldOutEvaluation(**line) for line in lines if "held_out_loss" in line)


class RunLog:
    """Writer of a run's log."""

    def __init__(self, folder: Path, console: Console) -> None:
        self.path, self.console = folder / METRICS, console

    def rewind(self, reached: Position) -> None:
        """Drop lines after a resumed position, because these steps will be run again."""
        if not self.path.exists():
            return
        # A killed process may have left half a line at the end.
        complete = [line for line in self.path.read_text().splitlines() if line.endswith("}")]
        lines = [json.loads(line) for line in complete]
        valid = [line for line in lines if Position(line["stage"], line["step"]) <= reached]
        write_whole(self.path, "".join(json.dumps(line) + "\n" for line in valid))

    def record(self, **values: Any) -> None:
        """Add one line to the file, with at least ``stage`` and ``step``."""
        with writing(self.path), self.path.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def say(self, text: str) -> None:
        """Print a line for people, without logging it."""
        self.console.print(text, highlight=False)


def learned(evaluations: Sequence[HeldOutEvaluation]) -> list[str]:
    """Return a sentence for each stage on its first evaluation and its best one.

    Stages are not compared with each other, because dense and sparse losses are over different
    keys.
    """
    sentences = []
    for _, group in groupby(evaluations, key=lambda evaluation: evaluation.stage):
        judged = list(group)
        first, best = judged[0], min(judged, key=lambda evaluation: evaluation.held_out_loss)
        sentences.append(
            f"{first.kind} attention: held-out loss {first.held_out_loss:.4g} -> "
            f"{best.held_out_loss:.4g}, recall {100 * first.held_out_recall:.1f} -> "
            f"{100 * best.held_out_recall:.1f} %"
        )
    return sentences


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read every line of a run's log."""
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
