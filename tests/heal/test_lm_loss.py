"""The LM loss in chunks against torch's on all logits at once, and what it keeps."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from sglang_indexcache.heal.lm_loss import next_token_losses
from sglang_indexcache.heal.packing import IGNORED

ROWS, LENGTH, WIDTH, VOCAB = 2, 23, 8, 31


def given(dtype: torch.dtype) -> tuple[torch.Tensor, torch.nn.Linear, torch.Tensor]:
    hidden = torch.randn(ROWS, LENGTH, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, VOCAB, (ROWS, LENGTH))
    targets[0, 5:9] = targets[1, -1] = IGNORED
    return hidden, torch.nn.Linear(WIDTH, VOCAB, bias=False, dtype=dtype), targets


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunks_equal_the_whole(chunk: int) -> None:
    hidden, head, targets = given(torch.float64)
    nats, hits = next_token_losses(hidden, head, targets, chunk)
    logits = head(hidden)
    want = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    torch.testing.assert_close(nats.flatten(), want)
    assert torch.equal(hits, logits.argmax(-1) == targets)
    mine = torch.autograd.grad(nats.sum(), [hidden, head.weight])
    whole = torch.autograd.grad(want.sum(), [hidden, head.weight])
    for got, expected in zip(mine, whole, strict=True):
        torch.testing.assert_close(got, expected)


def test_bfloat16_logits_are_compared_in_float32() -> None:
    hidden, head, targets = given(torch.bfloat16)
    nats, _ = next_token_losses(hidden, head, targets, 7)
    want = cross_entropy(
        head(hidden).flatten(0, 1).float(), targets.flatten(), reduction="none"
    ).view_as(nats)
    assert nats.dtype == torch.float32
    torch.testing.assert_close(nats, want)


def test_logits_are_made_for_a_chunk_of_labelled_tokens_only() -> None:
    hidden, head, targets = given(torch.float32)
    asked: list[int] = []

    def watched(rows: torch.Tensor) -> torch.Tensor:
        asked.append(len(rows))
        return head(rows)

    nats, _ = next_token_losses(hidden, watched, targets, 7)
    labelled = int((targets != IGNORED).sum())
    assert max(asked) == 7
    assert sum(asked) == labelled
    nats.sum().backward()
    assert sum(asked) == 2 * labelled  # once more in the backward pass: none was kept


def test_nothing_labelled_asks_for_nothing() -> None:
    hidden, head, targets = given(torch.float32)
    nats, hits = next_token_losses(hidden, head, torch.full_like(targets, IGNORED))
    assert not nats.any()
    assert not hits.any()
    nats.sum().backward()
    assert head.weight.grad is None or not head.weight.grad.any()
