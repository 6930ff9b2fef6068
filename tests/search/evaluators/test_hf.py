"""The reference evaluator against the tests' own oracle."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.random_model import make_model
from sglang_indexcache.errors import PatternError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.calibration import Calibration
from sglang_indexcache.search.evaluators import hf
from sglang_indexcache.search.evaluators.hf import TransformersEvaluator
from sglang_indexcache.search.ledger import Ledger
from tests.minimax_m3 import BLOCK, by_hand, make_m3
from tests.oracle import Oracle

LENGTH = 120
ORDER = ["FFFFFF", "FSFSFS", "FSFFFS", "FSSSFS", "FFFFFF", "FSSSSS", "FSFSFS"]


@pytest.fixture(autouse=True)
def few_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "BLOCK", 32)


@pytest.fixture(scope="module", params=["glm-5", "deepseek-v3.2"])
def folder(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Path:
    return checkpoints[request.param]


@pytest.fixture(scope="module")
def data() -> Calibration:
    random = np.random.default_rng(0)
    sequences = random.integers(10, 512, (4, LENGTH)).tolist()
    return Calibration(tuple(map(tuple, sequences)), 2, "test")


def truth(oracle: Oracle, data: Calibration, text: str) -> list[float]:
    return [
        float(torch.cat([oracle.answer(list(s), Pattern(text)).logprobs for s in batch]).mean())
        for batch in data.batches
    ]


def test_losses_are_the_oracles_with_and_without_reuse(folder: Path, data: Calibration) -> None:
    oracle = Oracle(folder, torch.float32, first_of_ties=False)
    reusing = TransformersEvaluator(folder, data)
    plain = TransformersEvaluator(folder, data, reuse_bytes=0)
    for text in ORDER:
        mine, expected = reusing.loss(Pattern(text), [0, 1]), plain.loss(Pattern(text), [0, 1])
        assert np.array_equal(mine, expected)
        assert -mine == pytest.approx(truth(oracle, data, text), abs=1e-6)
    assert reusing.layer_tokens < plain.layer_tokens == len(ORDER) * 4 * LENGTH * 6


def test_sequences_of_every_length(folder: Path, data: Calibration) -> None:
    """One length after the other, reused and not; the arguments of one are not the other's."""
    cut = tuple(
        ids[:length] for ids, length in zip(data.sequences, (120, 70, 97, 120), strict=True)
    )
    uneven = Calibration(cut, 2, "test")
    oracle = Oracle(folder, torch.float32, first_of_ties=False)
    evaluator = TransformersEvaluator(folder, uneven)
    assert evaluator.batch_tokens == (190, 217)
    for text in ORDER:
        loss = evaluator.loss(Pattern(text), [0, 1])
        assert -loss == pytest.approx(truth(oracle, uneven, text), abs=1e-6)
    assert evaluator.layer_tokens < len(ORDER) * 407 * 6


def test_only_what_counts_is_in_the_loss(folder: Path, data: Calibration) -> None:
    random = np.random.default_rng(1)
    masks = tuple(random.random(LENGTH - 1) < 0.1 for _ in data.sequences)
    evaluator = TransformersEvaluator(folder, replace(data, counted=masks))
    tokens = evaluator.token_losses(Pattern("FSFSFS"), [1, 0])
    by_batch = [masks[2:], masks[:2]]
    expected = [
        sum(float(x) for t, m in zip(*pair, strict=True) for x, c in zip(t, m, strict=True) if c)
        / sum(int(m.sum()) for m in pair[1])
        for pair in zip(tokens, by_batch, strict=True)
    ]
    assert evaluator.loss(Pattern("FSFSFS"), [1, 0]) == pytest.approx(expected)


def test_reuse_runs_only_from_the_first_difference(folder: Path, data: Calibration) -> None:
    evaluator = TransformersEvaluator(folder, data)
    for text, batch, layers in (
        ("FFFFFF", 0, 6),
        ("FFFFSF", 0, 2),
        ("FFFFSF", 0, 0),
        ("FFFSSF", 1, 6),
    ):
        before = evaluator.layer_tokens
        evaluator.loss(Pattern(text), [batch])
        assert evaluator.layer_tokens - before == 2 * LENGTH * layers


def test_a_searchs_batches_come_one_after_the_other(folder: Path, data: Calibration) -> None:
    """Give room to one batch: pattern by pattern its outputs would be dropped before their use."""
    flips = [Pattern.from_layers(6, set(range(6)) - {layer}) for layer in range(1, 6)]
    run = TransformersEvaluator(folder, data).run(Pattern.full(6), data.sequences[0])
    three_runs = 3 * 7 * (run.hidden[0].nbytes + run.indices[0].nbytes)
    evaluator = TransformersEvaluator(folder, data, reuse_bytes=three_runs * 5 // 2)
    Ledger(evaluator).many([Pattern.full(6), *flips])
    assert evaluator.layer_tokens == 4 * LENGTH * (6 + 5 + 4 + 3 + 2 + 1)


def test_indices_are_each_layers_own(folder: Path, data: Calibration) -> None:
    selections = TransformersEvaluator(folder, data).selected(data.sequences[0])
    assert selections.shape == (6, LENGTH, 64)
    for layer in selections:
        assert len(set(layer[-1].tolist())) == 64
    assert any((a != b).any() for a, b in itertools.pairwise(selections))


def test_a_layers_own_selection_in_a_run_of_a_pattern(folder: Path, data: Calibration) -> None:
    """F layers select what the pattern has them attend to; an S layer what it would if it ran."""
    ids, evaluator = data.sequences[0], TransformersEvaluator(folder, data)
    selections = evaluator.selected(ids, Pattern("FSSFSS"))
    for layer, text in enumerate(("FSSFSS", "FFSFSS", "FSFFSS", "FSSFSS", "FSSFFS", "FSSFSF")):
        fresh = TransformersEvaluator(folder, data)
        assert (selections[layer] == fresh.run(Pattern(text), ids).indices[layer][0].numpy()).all()
    assert (selections[1] == evaluator.selected(ids)[1]).all()  # so far nothing was shared
    assert (selections[2] != evaluator.selected(ids)[2]).any()


def test_a_checkpoint_that_shares_already(tmp_path: Path, data: Calibration) -> None:
    types = Pattern("FFSFFS").to_indexer_types()
    fields = {"indexer_types": types}
    make_model(tmp_path, size="tiny", vocab_size=512, dtype="float32", fields=fields)
    evaluator = TransformersEvaluator(tmp_path, data)
    assert evaluator.own == Pattern("FFSFFS")
    oracle = Oracle(tmp_path, torch.float32)
    for text in ("FFSFFS", "FFSFSS", "FSSFFS"):
        loss = evaluator.loss(Pattern(text), [0, 1])
        assert -loss == pytest.approx(truth(oracle, data, text), abs=1e-6)
    with pytest.raises(PatternError, match="ships no indexer weights"):
        evaluator.loss(Pattern("FFFFFF"), [0])


# -- MiniMax-M3: layers without an indexer, and blocks for each group of heads ---------------------


@pytest.fixture(scope="module", params=[False, True], ids=["text", "multimodal"])
def m3_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("m3")
    make_m3(multimodal=request.param).save_pretrained(path)
    return path


def test_m3_losses_are_those_by_hand(m3_folder: Path, data: Calibration) -> None:
    reusing = TransformersEvaluator(m3_folder, data)
    plain = TransformersEvaluator(m3_folder, data, reuse_bytes=0)
    assert (reusing.num_layers, reusing.topk) == (5, 24)
    ids = torch.tensor(data.batches[0])
    for text in ("FFFFF", "FSFSF", "FSFFF", "FSSSF", "FFFFF", "FSSSS"):
        mine = reusing.loss(Pattern(text), [0])
        assert mine == plain.loss(Pattern(text), [0])
        logprobs = [by_hand(plain._model, row, text)[:-1].log_softmax(-1) for row in ids]
        of_tokens = [p.gather(1, row[1:, None]) for p, row in zip(logprobs, ids, strict=True)]
        assert mine == pytest.approx(-float(torch.cat(of_tokens).mean()), abs=1e-5)
    assert reusing.layer_tokens < plain.layer_tokens == 6 * 2 * LENGTH * 5


@pytest.mark.parametrize("lists", [1, 3])
def test_m3_attention_on_blocks_is_the_sum_of_its_weights(
    m3_folder: Path, data: Calibration, monkeypatch: pytest.MonkeyPatch, lists: int
) -> None:
    """Dense attention of the third sparse layer, summed by hand over the blocks of two layers."""
    monkeypatch.setattr(hf, "LISTS", lists)
    model = TransformersEvaluator(m3_folder, data)
    ids = data.sequences[0][:117]  # the last block is not full
    queries = torch.tensor([5, 30, 77, 116])
    mass = model._mass(ids, queries)
    run = model.run(model.own, ids)
    attention = model._decoder.layers[4].self_attn
    indexer, attention.indexer = attention.indexer, None  # then it is dense
    try:
        with torch.no_grad():
            inputs = model._decoder.layers[4].input_layernorm(run.hidden[2])
            places = torch.arange(len(ids))[None]
            mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
            turn = model._decoder.rotary_emb(inputs, places)
            weights = attention(inputs, turn, mask, position_ids=places)[1][0]
    finally:
        attention.indexer = indexer
    for source, head in itertools.product((0, 2), range(4)):
        total = 0.0
        for query in queries.tolist():
            best = len(ids) // (lists * BLOCK)
            for block in run.indices[source][0, head // 2, query, :best].tolist():
                if block >= 0:
                    total += float(weights[head, query, block * BLOCK : (block + 1) * BLOCK].sum())
        assert mass[2, source, head] == pytest.approx(total, abs=1e-5)


def test_m3_has_what_pairs_of_layers_are_compared_by(
    m3_folder: Path, data: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "LISTS", 1)  # so short a text has one best block
    model = TransformersEvaluator(m3_folder, data)
    for matrix in (model.similarity(0), model.kept_mass(0)):
        assert matrix.shape == (5, 5)
        assert (np.diagonal(matrix) == 1).all()
        below = matrix[np.tril_indices(5, -1)]
        assert ((below > 0) & (below < 1)).all()
