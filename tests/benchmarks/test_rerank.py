"""An S layer that ranks again, against one query at a time in plain torch, on a random model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.random_model import make_tokenizer, save_checkpoint
from benchmarks.smollm2 import rerank
from benchmarks.smollm2.convert import convert, dsa_config
from benchmarks.smollm2.lean import Lean
from benchmarks.smollm2.rerank import Reranking, dot_products
from sglang_indexcache.pattern import Pattern
from tests.benchmarks.test_smollm2 import TOPK, random_llama

Masks = dict[int, list[torch.Tensor]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    llama, path = random_llama(layers=4), tmp_path_factory.mktemp("converted")
    torch.manual_seed(1)
    model = convert(llama, dsa_config(llama.config, index_heads=6, index_topk=TOPK))
    save_checkpoint(model, make_tokenizer(300), "float32", path)
    return path


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 300, (96,), generator=torch.Generator().manual_seed(2))


def scores(model: Lean, layer: int, read: torch.Tensor, query: int) -> torch.Tensor:
    """Score every visible key of one query, head by head."""
    queries, keys, weights = model.index_inputs(layer, read)
    total = torch.zeros(query + 1)
    for head in range(model.index_heads):
        hits = torch.stack([queries[query, head] @ keys[key] for key in range(query + 1)])
        total += weights[query, head] * hits.clamp(min=0)
    return total


def assert_best(chosen: torch.Tensor, among: torch.Tensor, count: int) -> None:
    """Check that ``chosen`` are the ``count`` highest of ``among``, or all if they are no more."""
    expected = among.sort(descending=True).values[:count]
    assert len(chosen) == len(expected)
    found = chosen.sort(descending=True).values
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_an_s_layer_takes_the_k_it_scores_highest_of_its_f_layers_2k(
    folder: Path, ids: torch.Tensor
) -> None:
    model, pattern = Reranking(folder), Pattern("FSFS")
    reads, handed, taken = dict[int, torch.Tensor](), Masks(), Masks()
    original = model.taken

    def noted(number: int, read: torch.Tensor, masks: list[torch.Tensor]) -> list[torch.Tensor]:
        handed[number], taken[number] = masks, original(number, read, masks)
        return taken[number]

    model.taken = noted  # type: ignore[method-assign]
    model.hidden(ids, pattern, keep=lambda number, read: reads.update({number: read}))
    source = differ = 0
    for layer in range(model.layers):
        source = layer if pattern.is_full(layer) else source
        for query in range(len(ids)):
            block, row = divmod(query, 64)
            candidates = handed[layer][block][row].nonzero()[:, 0]
            seen = taken[layer][block][row].nonzero()[:, 0]
            assert set(seen.tolist()) <= set(candidates.tolist())
            # Scores are compared and not places: equal scores may stand for each other.
            theirs = scores(model, source, reads[source], query)
            assert_best(theirs[candidates], theirs, 2 * TOPK)
            own = scores(model, layer, reads[layer], query)
            assert_best(own[seen], own[candidates], TOPK)
            differ += not theirs[seen].sort().values.allclose(theirs.sort().values[-TOPK:])
    assert differ > len(ids) / 2  # S layers do rank otherwise than their F layer


def test_dot_products_are_those_counted_row_by_row() -> None:
    pattern, candidates, tokens = "FSSS", 4_096, 131_072
    counted = sum(t + 3 * min(t, candidates) for t in range(1, tokens + 1))
    shares = dot_products(pattern, candidates)
    assert shares["prompt"] == pytest.approx(counted / (4 * tokens * (tokens + 1) // 2))
    assert shares["last"] == (tokens + 3 * candidates) / (4 * tokens)
    assert dot_products(pattern, 0) == {"last": 0.25, "prompt": 0.25}


def test_each_pattern_is_asked_once() -> None:
    arms = {"all F": "FFFF", "1/4 default, on a": "FSSS", "1/4 default, on b": "FFSS"}
    arms |= {"1/4 Algorithm 1": "FSFS", "1/8 default, on a": "FSSS", "1/8 Algorithm 1": "FSSF"}
    names = ["all F", "1/4 Algorithm 1", "1/4 default, on a", "1/8 Algorithm 1"]
    assert rerank.chosen(arms) == {name: arms[name] for name in names}
