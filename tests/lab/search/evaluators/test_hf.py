"""The reference evaluator against the tests' own oracle."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_indexcache.errors import PatternError
from sglang_indexcache.hf import share
from sglang_indexcache.lab.search.calibration import Calibration
from sglang_indexcache.lab.search.evaluators import hf
from sglang_indexcache.lab.search.evaluators.hf import TransformersEvaluator
from sglang_indexcache.lab.search.ledger import Ledger
from sglang_indexcache.pattern import Pattern
from tests.fixtures.models import make_model
from tests.oracle import Oracle

LENGTH, ALL = 120, range(4)
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
    return Calibration(tuple(map(tuple, sequences)), "test")


def truth(oracle: Oracle, data: Calibration, text: str) -> list[float]:
    return [
        float(oracle.answer(list(ids), Pattern(text)).logprobs.mean()) for ids in data.sequences
    ]


def test_losses_are_the_oracles_with_and_without_reuse(folder: Path, data: Calibration) -> None:
    oracle = Oracle(folder, torch.float32, first_of_ties=False)
    reusing = TransformersEvaluator(folder, data)
    plain = TransformersEvaluator(folder, data, reuse_bytes=0)
    for text in ORDER:
        mine, expected = reusing.loss(Pattern(text), ALL), plain.loss(Pattern(text), ALL)
        assert np.array_equal(mine, expected)
        assert -mine == pytest.approx(truth(oracle, data, text), abs=1e-6)
    assert reusing.layer_tokens < plain.layer_tokens == len(ORDER) * 4 * LENGTH * 6


def test_sequences_of_every_length(folder: Path, data: Calibration) -> None:
    """One length after the other, reused and not; the arguments of one are not the other's."""
    cut = tuple(
        ids[:length] for ids, length in zip(data.sequences, (120, 70, 97, 120), strict=True)
    )
    uneven = Calibration(cut, "test")
    oracle = Oracle(folder, torch.float32, first_of_ties=False)
    evaluator = TransformersEvaluator(folder, uneven)
    assert evaluator.batch_tokens == (120, 70, 97, 120)
    for text in ORDER:
        loss = evaluator.loss(Pattern(text), ALL)
        assert -loss == pytest.approx(truth(oracle, uneven, text), abs=1e-6)
    assert evaluator.layer_tokens < len(ORDER) * 407 * 6


def test_only_what_counts_is_in_the_loss(folder: Path, data: Calibration) -> None:
    random = np.random.default_rng(1)
    masks = tuple(random.random(LENGTH - 1) < 0.1 for _ in data.sequences)
    kinds = tuple(mask.astype(np.uint8) for mask in masks)
    evaluator = TransformersEvaluator(folder, replace(data, kinds=kinds))
    tokens = evaluator.token_losses(Pattern("FSFSFS"), [1, 0])
    expected = [
        sum(float(x) for x, counts in zip(*pair, strict=True) if counts) / int(pair[1].sum())
        for pair in zip(tokens, (masks[1], masks[0]), strict=True)
    ]
    assert evaluator.loss(Pattern("FSFSFS"), [1, 0]) == pytest.approx(expected)


def test_changes_are_those_of_two_whole_distributions(folder: Path, data: Calibration) -> None:
    """The oracle is transformers' own logits under the pattern and without one, token by token."""
    evaluator, pattern = TransformersEvaluator(folder, data), Pattern("FSFSFS")
    [changes] = evaluator.changes(pattern, [2])
    ids = data.sequences[2]
    model = evaluator._model
    with torch.no_grad():
        full = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
        with share(model, pattern):
            under = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    kl = torch.nn.functional.kl_div(under, full, log_target=True, reduction="none").sum(-1)
    assert changes.kl == pytest.approx(kl.numpy(), abs=1e-4)
    assert changes.kl.max() > 1e-3
    text = torch.tensor(ids[1:])
    assert changes.loss == pytest.approx(-under.gather(1, text[:, None])[:, 0].numpy(), abs=1e-4)
    for field, expected in (
        ("kept", under.argmax(-1) == full.argmax(-1)),
        ("right", under.argmax(-1) == text),
    ):
        assert (getattr(changes, field) == expected.double().numpy()).mean() > 0.97
    [alike] = evaluator.changes(Pattern.full(6), [2])
    assert np.abs(alike.kl).max() < 1e-6
    assert (alike.kept == 1).all()


def test_all_f_is_run_once_for_every_pattern_that_is_compared_with_it(
    folder: Path, data: Calibration
) -> None:
    """Each comparison ran it again, uncounted, where no sequence's layer outputs have room."""
    plain = TransformersEvaluator(folder, data, reuse_bytes=0)
    reusing = TransformersEvaluator(folder, data)
    patterns = [Pattern(text) for text in ("FSFSFS", "FFFFFF", "FSSSSS")]
    for pattern in patterns:
        compared = zip(plain.changes(pattern, ALL), reusing.changes(pattern, ALL), strict=True)
        assert all(np.array_equal(mine.kl, other.kl) for mine, other in compared)
    assert plain.layer_tokens == len(patterns) * 4 * LENGTH * 6


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
        assert evaluator.layer_tokens - before == LENGTH * layers


def test_a_searchs_batches_come_one_after_the_other(folder: Path, data: Calibration) -> None:
    """Give room to one batch: pattern by pattern its outputs would be dropped before their use."""
    flips = [Pattern.from_layers(6, set(range(6)) - {layer}) for layer in range(1, 6)]
    run = TransformersEvaluator(folder, data).run(Pattern.full(6), data.sequences[0])
    three_runs = 3 * 7 * (run.hidden[0].nbytes + run.indices[0].nbytes)
    evaluator = TransformersEvaluator(folder, data, reuse_bytes=three_runs * 3 // 2)
    Ledger(evaluator).many([Pattern.full(6), *flips])
    assert evaluator.layer_tokens == 4 * LENGTH * (6 + 5 + 4 + 3 + 2 + 1)


def test_indices_are_each_layers_own(folder: Path, data: Calibration) -> None:
    run = TransformersEvaluator(folder, data).run(Pattern.full(6), data.sequences[0])
    assert [lists.shape for lists in run.indices] == [(1, LENGTH, 64)] * 6
    for lists in run.indices:
        assert len(set(lists[0, -1].tolist())) == 64
    assert any((a != b).any() for a, b in itertools.pairwise(run.indices))


def test_a_checkpoint_that_shares_already(tmp_path: Path, data: Calibration) -> None:
    types = Pattern("FFSFFS").to_indexer_types()
    fields = {"indexer_types": types}
    make_model(tmp_path, size="tiny", vocab_size=512, dtype="float32", fields=fields)
    evaluator = TransformersEvaluator(tmp_path, data)
    assert evaluator.own == Pattern("FFSFFS")
    oracle = Oracle(tmp_path, torch.float32)
    for text in ("FFSFFS", "FFSFSS", "FSSFFS"):
        loss = evaluator.loss(Pattern(text), ALL)
        assert -loss == pytest.approx(truth(oracle, data, text), abs=1e-6)
    with pytest.raises(PatternError, match="ships no indexer weights"):
        evaluator.loss(Pattern("FFFFFF"), [0])
