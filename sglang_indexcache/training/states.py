"""Resumable states of a run: complete or not there, whenever the process dies."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelerate import Accelerator

KEPT = 2


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
