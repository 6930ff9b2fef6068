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
def verifies_by_the_next_requests_pages() -> None:
    """Our selection takes the pages of a batch's verified rows for another request's."""
    from dataclasses import replace

    from sglang_indexcache.serving.cuda import kernels

    select = kernels.select

    def mutant(kernel: Any, *args: Any, **options: Any) -> Any:
        def wrong(batch: Any, *rest: Any, **more: Any) -> Any:
            if batch.query_starts is None and batch.rows_per_request > 1:
                batch = replace(batch, block_table=batch.block_table.roll(1, 0))
            return kernel(batch, *rest, **more)

        return select(wrong, *args, **options)

    kernels.select = mutant


@_mutant
def shares_the_cache_between_patterns() -> None:
    """A prefix is found by its tokens alone."""
    from sglang_indexcache.serving.plan import Plan

    Plan.kv_namespace = lambda *_, **__: None  # type: ignore[assignment, method-assign]


@_mutant
def scores_from_a_row_too_early() -> None:
    """A share begins a row before its bound, and ends there."""
    from sglang_indexcache.serving.row_split import RowShare, RowSplit

    share = RowSplit.share

    def mutant(self: RowSplit, rank: int) -> RowShare:
        start, stop = self.bounds[rank : rank + 2]
        if not 0 < start < stop:
            return share(self, rank)
        bounds = (0, start - 1, stop - 1, self.bounds[-1])
        return share(RowSplit(self.query_lens, self.key_lens, bounds), 1)

    RowSplit.share = mutant  # type: ignore[method-assign]


@_mutant
def drops_a_part() -> None:
    """The last rank's lists are not taken."""
    from sglang_indexcache.serving.row_split import RowSplitter

    select = RowSplitter.select

    def mutant(self: RowSplitter, split: Any, out: Any, select_share: Any) -> Any:
        select(self, split, out, select_share)
        out[split.bounds[-2] :] = -1
        return out

    RowSplitter.select = mutant  # type: ignore[method-assign]


@_mutant
def joins_parts_in_another_order() -> None:
    """The last rank's lists come first."""
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    from sglang_indexcache.serving.row_split import RowSplitter

    select, gather = RowSplitter.select, GroupCoordinator.all_gather_into_tensor

    def mutant(self: RowSplitter, *args: Any) -> Any:
        def reversed_gather(group: Any, out: Any, mine: Any) -> None:
            gather(group, out, mine)
            out.copy_(out.view(group.world_size, *mine.shape).flip(0).reshape(out.shape))

        GroupCoordinator.all_gather_into_tensor = reversed_gather
        try:
            return select(self, *args)
        finally:
            GroupCoordinator.all_gather_into_tensor = gather

    RowSplitter.select = mutant  # type: ignore[method-assign]


@_mutant
def does_not_shift_keys() -> None:
    """Rows of a share look for their keys where the whole batch's lie."""
    from dataclasses import replace

    from sglang_indexcache.serving.cuda import row_split

    cut = row_split._cut

    def mutant(whole: Any, share: Any) -> Any:
        starts, ends = whole.indexer_k_start_end
        places = starts[share.rows], ends[share.rows]
        return replace(cut(whole, share), indexer_k_start_end=places)

    row_split._cut = mutant


@_mutant
def hands_a_half_the_first_rows() -> None:
    """Each half of an overlapped batch takes the whole batch's first rows."""
    from sglang_indexcache.serving.index_buffer import IndexBuffer

    inherit = IndexBuffer.inherit

    def mutant(self: IndexBuffer, layer: int, whole: IndexBuffer, rows: Any, *args: Any) -> None:
        start, stop = rows
        inherit(self, layer, whole, (0, stop - start), *args)

    IndexBuffer.inherit = mutant  # type: ignore[method-assign]


@_mutant
def gives_a_half_the_first_patterns() -> None:
    """Each half of an overlapped batch has the patterns of the whole batch's first rows."""
    from sglang_indexcache.serving.rows import RowPatterns

    cut = RowPatterns.cut

    def mutant(self: RowPatterns, start: int, stop: int, count: int) -> RowPatterns:
        return cut(self, 0, stop - start, count)

    RowPatterns.cut = mutant  # type: ignore[method-assign]


@_mutant
def gives_attention_the_padding() -> None:
    """Attention is given lists of rows of padding, which it does not have."""
    from sglang_indexcache.serving.index_buffer import IndexBuffer

    IndexBuffer.read = lambda self, layer, _rows: self.shared(layer)  # type: ignore[method-assign]


@_mutant
def takes_a_selection_for_all_rows() -> None:
    """A layer that is F for some rows gives its selection to those for which it is S, too."""
    from sglang_indexcache.serving.index_buffer import IndexBuffer

    IndexBuffer._merged = lambda *args: args[-1]  # type: ignore[method-assign]


@_mutant
def reads_where_nothing_was_selected() -> None:
    """A short prompt's dense attention, for which no indexer runs, asks for indices."""
    from sglang_indexcache.serving.cuda.backend import IndexCacheBackend

    forward_extend = IndexCacheBackend.forward_extend

    def mutant(
        self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *a: Any, **kw: Any
    ) -> Any:
        if self.use_mha:
            self._indices(layer.layer_id, batch, kw.get("topk_indices"), q.shape[0])
        return forward_extend(self, q, k, v, layer, batch, *a, **kw)

    IndexCacheBackend.forward_extend = mutant  # type: ignore[method-assign]
