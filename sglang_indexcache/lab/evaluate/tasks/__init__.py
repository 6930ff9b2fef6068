"""Long-context tasks, generated or from a user's file.

`TASKS` are generated offline to an exact number of tokens; `files.FILES` are read from a user's
files. The rules and prompts of generated tasks are RULER's, as far as they need no download;
`ruler` says what it takes from there, and which known defects it does not copy.
"""

from __future__ import annotations

from sglang_indexcache.lab.evaluate.tasks.context import Task
from sglang_indexcache.lab.evaluate.tasks.ruler import needles, notes, tracking

TASKS: dict[str, Task] = {"needles": needles, "tracking": tracking, "notes": notes}
DEFAULT = ("needles", "tracking")
"""Default tasks for a released model; notes are for small models."""
CONTROL = "notes"
"""Task of the control, at a length where no pattern can matter: short, and easy for every model."""
