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


def await_plugin() -> None:
    """Break this process as its environment says when SGLang loads the plugin, not before.

    A fork gets its environment after it has imported everything.
    """
    from sglang_indexcache.serving import plugin

    register = plugin.register

    def broken() -> None:
        if name := os.environ.get(VARIABLE):
            MUTANTS[name]()
        register()

    plugin.register = broken


@_mutant
def adopts_only_once() -> None:
    """Adopt an earlier stage's selection into an empty buffer only.

    A capture runs the layers three times, and finds it full from the second on.
    """
    from sglang_indexcache.serving.index_buffer import IndexBuffer

    adopt = IndexBuffer.adopt

    def mutant(self: IndexBuffer, layer: int, carried: Any) -> None:
        if self._indices is None:
            adopt(self, layer, carried)

    IndexBuffer.adopt = mutant  # type: ignore[method-assign]


@_mutant
def takes_a_slice_for_a_selection() -> None:
    """Attention knows by a tensor's identity that it is what the indexer has left.

    SGLang pads a forward's rows, and hands attention a slice.
    """
    from sglang_indexcache.serving.cuda.backend import IndexCacheBackend

    indices = IndexCacheBackend._indices

    def mutant(self: Any, layer: int, batch: Any, carried: Any, rows: int) -> Any:
        ours = self.index_buffer
        if carried is not None and carried is not ours._indices and ours.is_full(layer):
            ours.select(layer, carried)
        return indices(self, layer, batch, carried, rows)

    IndexCacheBackend._indices = mutant  # type: ignore[method-assign]


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
def shares_the_cache_between_patterns() -> None:
    """A prefix is found by its tokens alone."""
    from sglang_indexcache.serving.plan import Plan

    Plan.kv_namespace = lambda *_, **__: None  # type: ignore[assignment, method-assign]
