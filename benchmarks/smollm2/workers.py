"""Work on several cores: a process each, with one thread; no bit depends on how many run."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

import torch

from sglang_indexcache.lab.client.launch import die_with_parent

Item = TypeVar("Item")


def one_thread() -> None:
    """Let torch compute with one thread from now on; call it before anything is computed."""
    torch.set_num_threads(1)


def each(work: Callable[[Item], Any], items: Iterable[Item], device: str = "cpu") -> Iterator[Any]:
    """Yield what ``work`` returns for each item, in the order in which they are done.

    Workers are forked, so ``work`` may use everything that is loaded here; what it returns is
    pickled. The process must have computed with one thread only. A GPU is busy with one item, and
    forked workers cannot use it, so with ``device`` "cuda" the work is done here, in order.
    """
    if device != "cpu":
        yield from map(work, items)
        return
    _WORK.append(work)
    fork = multiprocessing.get_context("fork")
    # A worker left behind would wait for ever, and hold the locks of the files that are open here.
    pool = ProcessPoolExecutor(os.cpu_count() or 1, fork, initializer=die_with_parent)
    try:
        for future in as_completed([pool.submit(_call, item) for item in items]):
            yield future.result()
    finally:
        # In one call: another without ``cancel_futures``, as of ``with``, would take that back.
        pool.shutdown(cancel_futures=True)
        _WORK.pop()


_WORK: list[Callable[[Any], Any]] = []
"""The work under way: workers inherit it, since a closure cannot be pickled."""


def _call(item: Any) -> Any:
    return _WORK[-1](item)
