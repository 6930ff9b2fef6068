"""The index buffer: never a stale index, never a mixed pattern."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_indexcache.errors import StaleIndexError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.index_buffer import IndexBuffer
from sglang_indexcache.serving.policy import Policy
from sglang_indexcache.serving.process import ServingProcess
from sglang_indexcache.serving.rows import RowPatterns
from tests.serving.plans import plan


def process(text: str, layer_ids: tuple[int, ...] | None = None) -> ServingProcess:
    return ServingProcess(plan(text, mode="live", layer_ids=layer_ids or tuple(range(len(text)))))


def resolve(
    buffer: IndexBuffer, layer: int, carried: torch.Tensor | None, rows: int = 100
) -> torch.Tensor:
    """Take a layer's turn in static mode: SGLang brings ``carried``, attention has ``rows``."""
    if buffer.is_full(layer):
        buffer.select(layer, carried)
    else:
        buffer.adopt(layer, carried)
    return buffer.read(layer, rows)


def test_begin_forgets() -> None:
    buffer = IndexBuffer(process("FS"))
    buffer.begin()
    resolve(buffer, 0, torch.tensor([0]))
    buffer.begin()
    with pytest.raises(StaleIndexError, match=r"layer 1 shares .* holds nothing"):
        resolve(buffer, 1, None)


def test_full_layer_must_select() -> None:
    buffer = IndexBuffer(process("FF"))
    buffer.begin()
    with pytest.raises(StaleIndexError, match="its indexer selected nothing"):
        resolve(buffer, 0, None)


def test_nothing_before_the_first_forward() -> None:
    with pytest.raises(StaleIndexError, match="no forward has begun"):
        resolve(IndexBuffer(process("FS")), 0, torch.tensor([0]))


def test_switch_does_not_reach_a_forward_in_progress() -> None:
    state = process("FSSS")
    buffer = IndexBuffer(state)
    buffer.begin()
    selected = torch.tensor([0])
    resolve(buffer, 0, selected)
    state.replace(Policy.of(Pattern("FFFF")), "test")
    assert resolve(buffer, 1, None) is selected
    buffer.begin()
    assert buffer.is_full(1)


def test_pipeline_stage_adopts_what_the_engine_carried_in_every_pass() -> None:
    """A captured forward begins once and runs its layers three times."""
    buffer = IndexBuffer(process("FSSFSS"), first_layer=1)
    buffer.begin()
    for number in range(3):
        carried, selected = torch.tensor([number]), torch.tensor([number + 10])
        assert resolve(buffer, 1, carried) is carried
        assert resolve(buffer, 2, None) is carried
        assert resolve(buffer, 3, selected) is selected
        assert resolve(buffer, 4, None) is selected


def test_what_the_engine_carries_within_a_stage_is_not_adopted() -> None:
    buffer = IndexBuffer(process("FS"))
    buffer.begin()
    with pytest.raises(StaleIndexError, match="holds nothing"):
        resolve(buffer, 1, torch.tensor([7]))


# -- rows of several patterns ------------------------------------------------------------------

mixes = st.integers(1, 12).flatmap(
    lambda layers: st.lists(
        st.tuples(st.text("FS", min_size=layers - 1, max_size=layers - 1), st.integers(1, 4)),
        min_size=1,
        max_size=6,
    )
)


def selections(layer: int, rows: int) -> torch.Tensor:
    """``[rows, 2]``: what the indexer of ``layer`` selects for each row, told apart by both."""
    return torch.stack([torch.full((rows,), layer), torch.arange(rows)], dim=1)


@given(mixes, st.integers(0, 3), st.booleans())
def test_each_row_has_the_indices_of_its_own_f_layer(
    requests: list[tuple[str, int]], padding: int, is_live: bool
) -> None:
    """Against each row followed alone. In live mode the indexer asks before attention does."""
    patterns = [Pattern("F" + letters) for letters, _ in requests]
    lengths = [length for _, length in requests]
    owners = [p for p, length in zip(patterns, lengths, strict=True) for _ in range(length)]
    count = len(owners) + padding
    buffer = IndexBuffer(process(str(patterns[0])))
    for _ in range(2):  # nothing is left of the forward before
        buffer.begin(RowPatterns.of(patterns, lengths, torch.empty(count)))
        given_out: list[tuple[torch.Tensor, torch.Tensor]] = []
        for layer in range(len(patterns[0])):
            runs = any(pattern.is_full(layer) for pattern in patterns)
            assert buffer.is_full(layer) == runs
            selected = selections(layer, count) if runs else None
            if selected is not None:
                given_out.append((selected, selected.clone()))
            indices = resolve(buffer, layer, selected)
            if is_live:
                assert buffer.read(layer, count) is indices
            for row, pattern in enumerate(owners):
                assert indices[row].tolist() == [pattern.source_of(layer), row]
            if selected is not None and all(pattern.is_full(layer) for pattern in patterns):
                assert indices is selected  # nothing is copied
            given_out.append((indices, indices.clone()))
        for indices, as_given in given_out:
            assert torch.equal(
                indices, as_given
            )  # nothing that layers gave or were given is written to


@given(mixes, st.data())
def test_an_indexer_that_did_not_run_is_noticed_for_each_pattern(
    requests: list[tuple[str, int]], data: st.DataObject
) -> None:
    patterns = [Pattern("F" + letters) for letters, _ in requests]
    full = sorted({layer for pattern in patterns for layer in pattern.full_layers})
    missing = data.draw(st.sampled_from(full))
    buffer = IndexBuffer(process(str(patterns[0])))
    count = sum(length for _, length in requests)
    buffer.begin(RowPatterns.of(patterns, [n for _, n in requests], torch.empty(count)))
    for layer in range(len(patterns[0])):
        if layer == missing:  # it neither selects nor asks
            continue
        reads_it = any(p.source_of(layer) == missing for p in patterns)
        selected = selections(layer, count) if layer in full else None
        if reads_it:
            with pytest.raises(StaleIndexError, match=f"indices of pattern position {missing}"):
                resolve(buffer, layer, selected)
            return
        resolve(buffer, layer, selected)


def test_a_part_of_a_mixed_batch_inherits_its_rows() -> None:
    state = process("FSFS")
    full, part = IndexBuffer(state), IndexBuffer(state)
    patterns = [Pattern("FSFS"), Pattern("FFSS")]
    full.begin(RowPatterns.of(patterns, [2, 3], torch.empty(5)))
    part.begin(full.rows.cut(1, 4, 3))
    resolve(full, 0, selections(0, 5))
    resolve(full, 1, selections(1, 5))
    part.inherit(2, full, (1, 4), 3, before=2)
    indices = resolve(part, 2, selections(2, 3))
    assert indices.tolist() == [[2, 0], [1, 2], [1, 3]]
    part.inherit(3, full, (1, 4), 3, before=2)  # has its own by now
    assert resolve(part, 3, None) is indices


def test_attention_reads_the_rows_that_it_has() -> None:
    """SGLang pads a forward's rows and hands attention those in front."""
    buffer = IndexBuffer(process("FSFS"))
    buffer.begin(RowPatterns.of([Pattern("FSFS"), Pattern("FFSS")], [2, 1], torch.empty(8)))
    for layer in range(3):
        if buffer.is_full(layer):
            buffer.select(layer, selections(layer, 8))
        assert buffer.read(layer, 3).shape == (3, 2)
    assert buffer.read(3, 3).tolist() == [[2, 0], [2, 1], [1, 2]]
    assert buffer.shared(3).shape == (8, 2)


def test_an_indexer_may_leave_the_padding_out() -> None:
    buffer = IndexBuffer(process("FSFS"))
    buffer.begin(RowPatterns.of([Pattern("FSFS"), Pattern("FFSS")], [2, 1], torch.empty(8)))
    for layer, rows in enumerate([8, 5, 3]):
        buffer.select(layer, selections(layer, rows))
    assert buffer.read(3, 8).tolist() == [[2, 0], [2, 1], [1, 2]]
    buffer.begin(RowPatterns.of([Pattern("FSFS"), Pattern("FFSS")], [2, 1], torch.empty(8)))
    buffer.select(0, selections(0, 3))
    with pytest.raises(StaleIndexError, match="selected for 4 rows, of a forward that had 3"):
        buffer.select(1, selections(1, 4))


def test_the_rows_that_pad_a_part_select_nothing_of_the_other() -> None:
    """The halves of an overlap are padded each by itself, behind their own rows."""
    state = process("FSFS")
    for patterns in (["FSFS"], ["FSFS", "FFSS"]):
        full, part = IndexBuffer(state), IndexBuffer(state)
        patterns_of = [Pattern(patterns[row % len(patterns)]) for row in range(6)]
        full.begin(RowPatterns.of(patterns_of, [1] * 6, torch.empty(6)))
        part.begin(full.rows.cut(0, 3, 4))
        for layer in range(2):
            if full.is_full(layer):
                full.select(layer, selections(layer, 6))
        part.inherit(1, full, (0, 3), 4, before=1)
        if part.is_full(1):
            part.select(1, selections(1, 4))
        expected = [[row % len(patterns), row] for row in range(3)]
        assert part.shared(1)[:3].tolist() == part.read(1, 3).tolist() == expected
        assert part.shared(1)[3].tolist() == ([1, 3] if part.is_full(1) else [-1, -1])


def test_a_part_that_inherits_nothing_is_noticed() -> None:
    state = process("FSFS")
    part = IndexBuffer(state)
    part.begin(RowPatterns.of([Pattern("FSFS"), Pattern("FFSS")], [1, 1], torch.empty(2)))
    with pytest.raises(StaleIndexError, match="holds nothing"):
        resolve(part, 2, selections(2, 2))


def test_a_part_inherits_anew_in_each_forward() -> None:
    state = process("FSFS")
    full, part = IndexBuffer(state), IndexBuffer(state)
    patterns = [Pattern("FSFS"), Pattern("FFSS")]
    for number in (100, 200):
        full.begin(RowPatterns.of(patterns, [1, 1], torch.empty(2)))
        part.begin(full.rows.cut(0, 2, 2))
        resolve(full, 0, number + selections(0, 2))
        resolve(full, 1, number + selections(1, 2))
        part.inherit(2, full, (0, 2), 2, before=2)
        indices = resolve(part, 2, number + selections(2, 2))
        assert indices.tolist() == [[number + 2, number], [number + 1, number + 1]]


def test_a_part_of_one_pattern_inherits_in_every_pass() -> None:
    """A captured forward begins once and runs its layers three times."""
    state = process("FSFS")
    full, part = IndexBuffer(state), IndexBuffer(state)
    full.begin()
    part.begin(full.rows.cut(1, 3, 2))
    for number in (100, 200, 300):
        resolve(full, 0, number + selections(0, 3))
        part.inherit(1, full, (1, 3), 2, before=1)
        assert resolve(part, 1, None).tolist() == [[number, number + 1], [number, number + 2]]
        selected = number + selections(2, 2)
        resolve(part, 2, selected)
        part.inherit(3, full, (1, 3), 2, before=1)  # its F layer is its own
        assert resolve(part, 3, None) is selected


@pytest.mark.parametrize(("layers", "contents"), [([], "nothing"), ([0], "those of position 0")])
def test_what_the_whole_batch_did_not_select_is_noticed_in_its_parts(
    layers: list[int], contents: str
) -> None:
    state = process("FFSS")
    full, part = IndexBuffer(state), IndexBuffer(state)
    full.begin()
    part.begin()
    for layer in layers:
        resolve(full, layer, selections(layer, 1))
    part.inherit(2, full, (0, 1), 1, before=2)
    with pytest.raises(StaleIndexError, match=f"position 1, but the buffer holds {contents}"):
        resolve(part, 2, None)


def test_two_layers_may_select_into_the_same_tensor() -> None:
    buffer, tensor = IndexBuffer(process("FFS")), torch.tensor([1])
    buffer.begin()
    for layer, selected in enumerate([tensor, tensor, None]):
        assert resolve(buffer, layer, selected) is tensor


def test_a_stage_of_a_hybrid_model_adopts_by_the_models_layers() -> None:
    buffer = IndexBuffer(process("FFS", layer_ids=(3, 7, 11)), first_layer=5)
    buffer.begin()
    selected, carried = torch.tensor([1]), torch.tensor([2])
    resolve(buffer, 7, selected)
    assert resolve(buffer, 11, carried) is selected


@pytest.mark.parametrize(
    ("patterns", "selections"), [(["FSSF"], [1, 0, 0, 1]), (["FSSF", "FFSS"], [1, 1, 0, 1])]
)
def test_a_layer_counts_as_selecting_where_it_is_full_for_some_row(
    patterns: list[str], selections: list[int]
) -> None:
    process = ServingProcess(plan("FSSF", mode="live"))
    buffer = IndexBuffer(process)
    buffer.begin(RowPatterns.of([Pattern(text) for text in patterns], [1, 1], torch.empty(2)))
    for layer in range(4):
        process.count_layer(layer, is_full=buffer.is_full(layer))
    assert process.counters.indexer_selections == selections
    assert process.counters.index_reuses == [1 - count for count in selections]
