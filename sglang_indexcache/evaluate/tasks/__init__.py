"""Long-context tasks: one file each, and one row here.

`TASKS` are generated offline to an exact number of tokens; `FILES` are read from what a user has.
The rules and prompts are those of their published sources as far as they need no download; each
file says what it takes from where, and which known defects of the source it does not copy.
"""

from __future__ import annotations

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.tasks.chat import Tokenizer
from sglang_indexcache.evaluate.tasks.context import (
    QUESTIONS,
    Context,
    Question,
    Task,
    fitted,
)
from sglang_indexcache.evaluate.tasks.files import FILES, LETTERS
from sglang_indexcache.evaluate.tasks.graph import parents, search
from sglang_indexcache.evaluate.tasks.items import Item
from sglang_indexcache.evaluate.tasks.needles import needles
from sglang_indexcache.evaluate.tasks.notes import notes
from sglang_indexcache.evaluate.tasks.rounds import rounds
from sglang_indexcache.evaluate.tasks.tracking import tracking

TASKS: dict[str, Task] = {
    "needles": needles,
    "tracking": tracking,
    "rounds": rounds,
    "parents": parents,
    "search-2": search(2),
    "search-3": search(3),
    "notes": notes,
}
DEFAULT = tuple(task for task in TASKS if task != "notes")
"""What a released model is asked; notes are for small ones."""
CONTROL = "notes"
"""What the control asks where nothing else is generated: short, and easy for every model."""
CHANCE = {"longbench-v2": 1 / len(LETTERS)}
"""Share of right answers that guessing gives, where it gives any."""

__all__ = [
    "CHANCE",
    "CONTROL",
    "DEFAULT",
    "FILES",
    "QUESTIONS",
    "TASKS",
    "Context",
    "Item",
    "Question",
    "Task",
    "Tokenizer",
    "make_context",
]


def make_context(
    task: str,
    tokenizer: Tokenizer,
    length: int,
    seed: int,
    *,
    haystack: str = "",
    questions: int = QUESTIONS,
) -> Context:
    """A context of ``task`` with its questions; the same for the same arguments, byte for byte.

    Args:
        task: a name in :data:`TASKS`.
        tokenizer: of the model.
        length: tokens of the context with its longest question and that question's answer.
        seed: which context of the task.
        haystack: running text for the tasks that hide something in it.
        questions: behind the context.

    Raises:
        QualityError: an unknown task, a length too small for it, or a haystack that is too short.
    """
    if task not in TASKS:
        raise QualityError(f"no task is called {task!r}; there are {', '.join(TASKS)}")
    return fitted(task, TASKS[task], tokenizer, length, seed, haystack, questions)
