"""Defects that this plugin once had, each put back into the processes of one server.

A rehearsal is worth what it catches: ``test_mutants.py`` holds it to these.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

VARIABLE = "INDEXCACHE_REHEARSAL_MUTANT"
MUTANTS: dict[str, Callable[[], None]] = {}


def _mutant(put_back: Callable[[], None]) -> Callable[[], None]:
    MUTANTS[put_back.__name__] = put_back
    return put_back


def put_back() -> None:
    """Break this process as the environment says, once all that is broken can be imported."""
    if name := os.environ.get(VARIABLE):
        MUTANTS[name]()


@_mutant
def adopts_only_once() -> None:
    """What an earlier stage selected is taken into an empty buffer only.

    A capture runs the layers three times, and finds it full from the second on.
    """
    from sglang_indexcache.serving.index_buffer import IndexBuffer

    adopt = IndexBuffer.adopt

    def mutant(self: IndexBuffer, layer: int, carried: Any) -> None:
        if self.held is None:
            adopt(self, layer, carried)

    IndexBuffer.adopt = mutant  # type: ignore[method-assign]


@_mutant
def leaves_the_drafts_backend_unnamed() -> None:
    """Our name stays for the draft, and SGLang knows no such backend for one."""
    from sglang_indexcache.serving import plugin

    declare = plugin.declare_resolution

    def mutant(server_args: Any, name: str, **fields: Any) -> None:
        fields.pop("speculative_draft_attention_backend", None)
        declare(server_args, name, **fields)

    plugin.declare_resolution = mutant


@_mutant
def writes_masks_that_no_graph_reads() -> None:
    """Two backends have a buffer of masks each: one is captured, the other written."""
    from sglang_indexcache.serving.cuda import backend

    more_graphs = backend._more_graphs

    def mutant(*args: Any) -> Any:
        more_graphs(*args)  # is asked from now on
        return more_graphs(*args)

    backend._more_graphs = mutant
