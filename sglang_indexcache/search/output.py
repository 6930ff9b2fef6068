"""The folder that a search fills while it runs."""

from __future__ import annotations

import time
from pathlib import Path

from sglang_indexcache.library import Entry
from sglang_indexcache.search.entries import entry, summary, write_entry
from sglang_indexcache.search.figures import draw_losses
from sglang_indexcache.search.path import Step
from sglang_indexcache.search.run import Found, Search
from sglang_indexcache.search.sources import Setup
from sglang_indexcache.search.targets import Mark
from sglang_indexcache.support.files import write_json

_SECONDS_BETWEEN_PLOTS = 10.0
_PARTIAL = "partial"


class OutputFolder:
    """``<name>-<retention>.yaml``, ``search.json``, ``losses.png``, kept up to date.

    Args:
        folder: where.
        search: the one that is reported.
        origin: what it measures with, and the prefix of the patterns' names.
    """

    def __init__(self, folder: Path, search: Search, origin: Setup) -> None:
        self._folder, self._search, self._origin = folder, search, origin
        self._plotted = 0.0

    def update(self, event: Step | Found) -> None:
        """Write what ``event`` changed."""
        if isinstance(event, Found):
            write_entry(entry(self._search, event, self._origin), self._folder)
            return
        write_json(self._folder / "search.json", summary(self._search, self._origin))
        if time.monotonic() - self._plotted > _SECONDS_BETWEEN_PLOTS:
            draw_losses(self._search, self._folder / "losses.png")
            self._plotted = time.monotonic()

    def finish(self) -> None:
        """Write everything; of an interrupted search also the last pattern that it committed."""
        partial = self._folder / f"{self._origin.name}-{_PARTIAL}.yaml"
        if self._search.is_complete:
            partial.unlink(missing_ok=True)
        elif self._search.path:
            write_entry(self._last_committed(), self._folder)
        if not self._search.path:
            return
        for found in self._search.found.values():
            write_entry(entry(self._search, found, self._origin), self._folder)
        write_json(self._folder / "search.json", summary(self._search, self._origin))
        draw_losses(self._search, self._folder / "losses.png")

    def _last_committed(self) -> Entry:
        step = self._search.path[-1]
        count = len(step.pattern.full_layers)
        mark = Mark(count, f"{count}/{len(step.pattern)}")
        found = Found(mark, step.pattern, step.loss, step.standard_error, step.pattern, step.loss)
        item = entry(self._search, found, self._origin)
        return item.model_copy(update={"name": f"{self._origin.name}-{_PARTIAL}"})
