"""Long-context tasks: what is generated, and what a user's file holds.

`TASKS` are generated offline to an exact number of tokens; `files.FILES` are read from what a user
has. The rules and prompts of the generated ones are RULER's as far as they need no download;
`ruler` says what it takes, and which known defects of the source it does not copy.
"""

from __future__ import annotations

from sglang_indexcache.lab.evaluate.tasks.context import Task
from sglang_indexcache.lab.evaluate.tasks.ruler import needles, notes, tracking

TASKS: dict[str, Task] = {"needles": needles, "tracking": tracking, "notes": notes}
DEFAULT = ("needles", "tracking")
"""What a released model is asked; notes are for small ones."""
CONTROL = "notes"
"""What the control asks, where no pattern can matter: short, and easy for every model."""
