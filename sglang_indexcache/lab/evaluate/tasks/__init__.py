"""Long-context tasks: one file for each source, published or ours, and one row here.

`TASKS` are generated offline to an exact number of tokens; `files.FILES` are read from what a user
has. The rules and prompts are those of their published sources as far as they need no download;
each file says what it takes from where, and which known defects of the source it does not copy.
"""

from __future__ import annotations

from sglang_indexcache.lab.evaluate.tasks.context import Task
from sglang_indexcache.lab.evaluate.tasks.files import LETTERS
from sglang_indexcache.lab.evaluate.tasks.graph import parents, search
from sglang_indexcache.lab.evaluate.tasks.hotpot import HotpotQA
from sglang_indexcache.lab.evaluate.tasks.rounds import rounds
from sglang_indexcache.lab.evaluate.tasks.ruler import needles, notes, tracking

TASKS: dict[str, Task] = {
    "needles": needles,
    "tracking": tracking,
    "rounds": rounds,
    "parents": parents,
    "search-2": search(2),
    "search-3": search(3),
    "notes": notes,
}
MADE_OF_FILES = {"hotpotqa": HotpotQA.read}
"""Tasks that generate contexts of what a user's file holds."""
DEFAULT = tuple(task for task in TASKS if task != "notes")
"""What a released model is asked; notes are for small ones."""
CONTROL = "notes"
"""What the control asks where nothing else is generated: short, and easy for every model."""
CHANCE = {"longbench-v2": 1 / len(LETTERS)}
"""Share of right answers that guessing gives, where it gives any."""
