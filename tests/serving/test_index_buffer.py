"""The index buffer: never a stale index, never a mixed pattern."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_indexcache.errors import StaleIndexError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.active import ActivePattern
from sglang_indexcache.serving.index_buffer import IndexBuffer
from tests.serving.plans import plan


def active(text: str, layer_ids: tuple[int, ...] | None = None) -> ActivePattern:
    return ActivePattern(plan(text, mode="live", layer_ids=layer_ids or tuple(range(len(text)))))


def forward(buffer: IndexBuffer, pattern: Pattern) -> list[torch.Tensor]:
    """One forward of a model whose layer i selects a tensor of its own."""
    buffer.begin()
    used = []
    for layer in range(len(pattern)):
        selected = torch.tensor([layer]) if buffer.is_full(layer) else None
        used.append(buffer.resolve(layer, selected))
    return used


texts = st.text("FS", max_size=30).map(lambda rest: "F" + rest)


@given(st.lists(texts, min_size=1, max_size=6))
def test_each_layer_gets_its_sources_indices_across_switches(sequence: list[str]) -> None:
    width = max(map(len, sequence))
    patterns = [Pattern(text.ljust(width, "S")) for text in sequence]
    state = active(str(patterns[0]))
    buffer = IndexBuffer(state)
    for pattern in patterns:
        state.replace(pattern, "test")
        for layer, indices in enumerate(forward(buffer, pattern)):
            assert int(indices) == pattern.source_of(layer)


def test_holds_a_reference_and_no_copy() -> None:
    buffer = IndexBuffer(active("FSS"))
    buffer.begin()
    selected = torch.tensor([1, 2])
    assert buffer.resolve(0, selected) is selected
    assert buffer.resolve(1, None) is selected
    assert buffer.resolve(2, selected) is selected


def test_begin_forgets() -> None:
    buffer = IndexBuffer(active("FS"))
    forward(buffer, Pattern("FS"))
    buffer.begin()
    with pytest.raises(StaleIndexError, match=r"layer 1 shares .* holds nothing"):
        buffer.resolve(1, None)


def test_skipped_full_layer_is_noticed() -> None:
    buffer = IndexBuffer(active("FSFS"))
    buffer.begin()
    buffer.resolve(0, torch.tensor([0]))
    with pytest.raises(StaleIndexError, match="position 2, but the buffer holds those of"):
        buffer.resolve(3, None)


def test_full_layer_must_select() -> None:
    buffer = IndexBuffer(active("FF"))
    buffer.begin()
    with pytest.raises(StaleIndexError, match="its indexer selected nothing"):
        buffer.resolve(0, None)


def test_nothing_before_the_first_forward() -> None:
    with pytest.raises(StaleIndexError, match="no forward has begun"):
        IndexBuffer(active("FS")).resolve(0, torch.tensor([0]))


def test_switch_does_not_reach_a_forward_in_progress() -> None:
    state = active("FSSS")
    buffer = IndexBuffer(state)
    buffer.begin()
    selected = torch.tensor([0])
    buffer.resolve(0, selected)
    state.replace(Pattern("FFFF"), "test")
    assert buffer.resolve(1, None) is selected
    buffer.begin()
    assert buffer.is_full(1)


def test_pipeline_stage_adopts_what_the_engine_carried_in_every_pass() -> None:
    """A captured forward begins once and runs its layers three times."""
    buffer = IndexBuffer(active("FSSFSS"), first_layer=1)
    buffer.begin()
    for number in range(3):
        carried, own = torch.tensor([number]), torch.tensor([number + 10])
        assert buffer.resolve(1, carried) is carried
        assert buffer.resolve(2, None) is carried
        assert buffer.resolve(3, own) is own
        assert buffer.resolve(4, None) is own


def test_what_the_engine_carries_within_a_stage_is_not_adopted() -> None:
    buffer = IndexBuffer(active("FS"))
    buffer.begin()
    with pytest.raises(StaleIndexError, match="holds nothing"):
        buffer.resolve(1, torch.tensor([7]))


def test_two_sub_batches_do_not_meet() -> None:
    state = active("FS")
    first, second = IndexBuffer(state), IndexBuffer(state)
    first.begin()
    second.begin()
    a, b = torch.tensor([1]), torch.tensor([2])
    first.resolve(0, a)
    second.resolve(0, b)
    assert first.resolve(1, None) is a
    assert second.resolve(1, None) is b


def test_hybrid_model_counts_only_its_dsa_layers() -> None:
    buffer = IndexBuffer(active("FSF", layer_ids=(3, 7, 11)))
    buffer.begin()
    selected = torch.tensor([1])
    buffer.resolve(3, selected)
    assert buffer.resolve(7, None) is selected
    assert buffer.is_full(11)
