from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_indexcache.errors import TrainingError
from sglang_indexcache.lab.heal.packing import Layout, PackedBatch, selected_mask


def naive_visible(documents: torch.Tensor) -> torch.Tensor:
    rows, length = documents.shape
    mask = torch.zeros(rows, length, length, dtype=torch.bool)
    for b in range(rows):
        for t in range(length):
            for s in range(t + 1):
                mask[b, t, s] = documents[b, t] == documents[b, s]
    return mask


def test_a_moved_layout_keeps_its_queries() -> None:
    layout = Layout(torch.zeros(1, 5, dtype=torch.int64), torch.tensor([1, 4]))
    moved = layout.to(torch.device("cpu"))
    assert moved.queries is not None
    assert torch.equal(moved.queries, torch.tensor([1, 4]))
    assert torch.equal(moved.documents, layout.documents)


def test_blocks_of_the_mask_are_causal_and_stay_in_their_document() -> None:
    documents = torch.randint(0, 3, (2, 13)).sort(-1).values
    documents[1, -4:] = -1
    layout = Layout(documents)
    for size in (1, 5, 13, 100):
        everyone = torch.arange(13).expand(2, 13, 13)
        for rows in layout.blocks(size):
            expected = naive_visible(documents)[:, rows]
            assert torch.equal(layout.visible(rows), expected[..., : rows.stop])
            assert torch.equal(layout.sees(rows, everyone[:, rows]), expected)
            assert not expected[..., rows.stop :].any()
        stops = [rows.stop for rows in layout.blocks(size)]
        assert stops == sorted(stops, reverse=True)  # the one that sees the most keys is first


def test_selected_mask_ignores_empty_places() -> None:
    mask = selected_mask(torch.tensor([[[2, -1, 0], [-1, -1, 3]]]), keys=4)
    assert mask.tolist() == [[[True, False, True, False], [False, False, False, True]]]


@pytest.mark.parametrize("documents", [torch.zeros(3), torch.zeros(3, dtype=torch.int64)])
def test_wrong_documents_are_one_clear_error(documents: torch.Tensor) -> None:
    with pytest.raises(TrainingError, match="integer tensor"):
        Layout(documents)


def test_an_empty_block_is_an_error() -> None:
    with pytest.raises(TrainingError, match="at least one query"):
        list(Layout(torch.zeros(1, 3, dtype=torch.int64)).blocks(0))


def test_rows_become_a_batch() -> None:
    rows = [tuple(np.asarray(ids, dtype=np.int32) for ids in row) for row in ([[5, 6], [7]], [[8]])]
    batch = PackedBatch.of(rows, length=4, padding=9)
    assert batch.ids.tolist() == [[5, 6, 7, 9], [8, 9, 9, 9]]
    assert batch.documents.tolist() == [[0, 0, 1, -1], [0, -1, -1, -1]]
    assert batch.positions.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0]]
