"""What a run's folder holds beside its checkpoint: resumable states, and its numbers.

A state is complete or not there, whenever the process dies. Numbers go to JSONL, the console, and
TensorBoard if wanted.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from sglang_indexcache.errors import TrainingError

if TYPE_CHECKING:
    from accelerate import Accelerator

KEPT = 2
METRICS = "metrics.jsonl"


@dataclass(frozen=True, order=True)
class Position:
    """``step`` steps of stage number ``stage`` are done."""

    stage: int
    step: int

    @property
    def name(self) -> str:
        """Of the folder."""
        return f"stage{self.stage}-step{self.step}"


class States:
    """The states under a run's folder.

    Args:
        folder: of the run.
        accelerator: knows what to save.
    """

    def __init__(self, folder: Path, accelerator: Accelerator) -> None:
        self.folder, self.accelerator = folder / "states", accelerator

    def latest(self) -> Position | None:
        """The newest complete state."""
        return max(self._positions(), default=None)

    def save(self, position: Position) -> None:
        """Write a state and drop all but the newest :data:`KEPT`."""
        unfinished = self.folder / "unfinished"
        if self.accelerator.is_main_process:
            shutil.rmtree(unfinished, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(unfinished))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            target = self.folder / position.name
            shutil.rmtree(target, ignore_errors=True)
            unfinished.rename(target)  # atomic: a state that has its name is complete
            for old in sorted(self._positions())[:-KEPT]:
                shutil.rmtree(self.folder / old.name)
        self.accelerator.wait_for_everyone()

    def load(self, position: Position) -> None:
        """Restore everything that was prepared."""
        self.accelerator.load_state(str(self.folder / position.name))

    def _positions(self) -> list[Position]:
        found = []
        for path in self.folder.glob("stage*-step*"):
            match = re.fullmatch(r"stage(\d+)-step(\d+)", path.name)
            if match:
                found.append(Position(int(match[1]), int(match[2])))
        return found


class RunLog:
    """Writes one process's log; other processes write nothing.

    Args:
        folder: of the run.
        enabled: whether this process is the one that writes.
        console: for people.
        tensorboard: write events under ``folder/tensorboard`` as well.

    Raises:
        TrainingError: TensorBoard is wanted and not installed.
    """

    def __init__(self, folder: Path, enabled: bool, console: Console, tensorboard: bool) -> None:
        self.path = folder / METRICS
        self.enabled, self.console = enabled, console
        self._writer: Any = None
        if enabled and tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise TrainingError(
                    "the recipe says tensorboard: true, and that package is missing. "
                    "Install it: pip install tensorboard"
                ) from error
            self._writer = SummaryWriter(str(folder / "tensorboard"))

    def rewind(self, stage: int, step: int) -> None:
        """Drop lines after a resumed position: those steps will be taken again."""
        if not self.enabled or not self.path.exists():
            return
        # A killed process may have left half a line.
        whole = [line for line in self.path.read_text().splitlines() if line.endswith("}")]
        lines = [json.loads(line) for line in whole]
        kept = [line for line in lines if (line["stage"], line["step"]) <= (stage, step)]
        self.path.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def record(self, **values: Any) -> None:
        """Add one line to the file; must have ``stage`` and ``step``."""
        if self.enabled:
            with self.path.open("a") as file:
                file.write(json.dumps(values) + "\n")

    def write(self, **values: Any) -> None:
        """As :meth:`record`, and tell people; lists of numbers are for the file."""
        if not self.enabled:
            return
        self.record(**values)
        short = {name: value for name, value in values.items() if not isinstance(value, list)}
        self.console.print("  ".join(f"{k} {_short(v)}" for k, v in short.items()), highlight=False)
        if self._writer is not None:
            lists = {
                f"{name}/{place}": value
                for name, some in values.items()
                if isinstance(some, list)
                for place, value in enumerate(some)
            }
            for name, value in (short | lists).items():
                if isinstance(value, float):
                    self._writer.add_scalar(name, value, values["total_step"])
            self._writer.flush()

    def say(self, text: str) -> None:
        """A line for people only."""
        if self.enabled:
            self.console.print(text, highlight=False)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Every line of a run's log."""
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
