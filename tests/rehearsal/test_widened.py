"""The widened checkpoint says what the trained one says: transformers reads both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sglang_indexcache.lab.demo import shipped_checkpoint
from tests.rehearsal.widened import TOPK, real_text, widen

UNIGRAM = 5.99
"""Nats a token that the frequencies of tokens alone give (benchmarks/results/small_checkpoint)."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return widen(tmp_path_factory.mktemp("wide"))


def logprobs(model: Path, ids: list[int], topk: int) -> torch.Tensor:
    """Return ``[n - 1, vocab]`` of all but the last token, in float32."""
    config = AutoConfig.from_pretrained(model)
    config.index_topk = topk
    loaded_model = AutoModelForCausalLM.from_pretrained(
        model, config=config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return loaded_model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)[:-1]


def test_it_says_what_the_narrow_one_says_where_everything_is_selected(wide: Path) -> None:
    ids = real_text(0, 300)
    narrow = logprobs(shipped_checkpoint(), ids, TOPK)
    assert (logprobs(wide, ids, TOPK) - narrow).abs().max() < 1e-3


def test_it_selects_almost_what_the_narrow_one_selects(wide: Path) -> None:
    """A part that was not rotated now turns by a tenth of a milliradian a token, or less."""
    ids = real_text(0, 300)
    narrow, all_selected = (logprobs(shipped_checkpoint(), ids, topk) for topk in (64, TOPK))
    apart = (logprobs(wide, ids, 64) - narrow).abs().mean()
    assert apart < 0.1 * (all_selected - narrow).abs().mean()


def test_text_beyond_the_topk_is_read_far_better_than_by_frequencies(wide: Path) -> None:
    ids = real_text(0, TOPK + 256)
    logprobs_of_text = logprobs(wide, ids, TOPK).gather(1, torch.tensor(ids[1:])[:, None])
    assert -logprobs_of_text[TOPK:].mean() < 4.5 < UNIGRAM
