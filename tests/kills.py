"""Work that is killed, at a chosen change of the disk or from outside."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

PROCESSES: Any = multiprocessing.get_context("forkserver")
"""Its processes start at once: they are forks of one that has imported what they need.

It reads its list once, so the modules of every file of tests that uses it stand here.
"""
PROCESSES.set_forkserver_preload(
    [
        "tests.lab.evaluate.evaluate",
        "tests.lab.heal.test_heal_processes",
        "tests.lab.search.slow_search",
        "tests.serving.test_agreement",
    ]
)

TOUCHES = {
    *("open", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate"),
    *("shutil.copyfile", "shutil.rmtree"),
}
"""Python's audit events at which a file or folder is about to be opened, changed or removed."""
KILLED = 9


def kill_at_each_touch(work: Callable[[], object]) -> Iterator[int]:
    """Run ``work`` again and again, in a child that ends one touch of the disk later each time.

    The child ends without cleaning up, as by SIGKILL. Yields the number of touches after every
    kill, so that the caller can look at what is left; ends when ``work`` was done.
    """
    touches = 0
    while _is_killed(work, touches):
        yield touches
        touches += 1


def _is_killed(work: Callable[[], object], touches: int) -> bool:
    child = os.fork()
    if child == 0:
        _end_after(touches)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED), f"the work failed at touch {touches}"
    return code == KILLED


def _end_after(touches: int) -> None:
    remaining = touches

    def count(event: str, _arguments: tuple[Any, ...]) -> None:
        nonlocal remaining
        if event in TOUCHES:
            if not remaining:
                os._exit(KILLED)
            remaining -= 1

    sys.addaudithook(count)
