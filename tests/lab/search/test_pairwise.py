"""Searches by pairs of layers: matrices by their properties, patterns against all patterns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from sglang_indexcache.cli import app
from sglang_indexcache.errors import SearchError
from sglang_indexcache.lab.demo import shipped_checkpoint
from sglang_indexcache.lab.search.calibration import Calibration
from sglang_indexcache.lab.search.evaluators import Floats, hf
from sglang_indexcache.lab.search.evaluators.hf import TransformersEvaluator, lost_by_worst_head
from sglang_indexcache.lab.search.ledger import Ledger
from sglang_indexcache.lab.search.methods import METHODS, METHODS_OF_SERVERS
from sglang_indexcache.lab.search.methods.pairwise import Pairwise, most_similar, pair_matrix
from sglang_indexcache.lab.search.rules import Constraints, parse_targets
from sglang_indexcache.pattern import Pattern
from tests.lab.search.helpers import landscape
from tests.lab.search.oracle import every_pattern, source


@settings(deadline=None, max_examples=100)
@given(count=st.integers(1, 9), seed=st.integers(0, 10**6), data=st.data())
def test_the_pattern_is_the_best_of_all_that_the_rules_allow(
    count: int, seed: int, data: st.DataObject
) -> None:
    """Layers that must stay F, and layers that ship no indexer, included."""
    layers = st.lists(st.integers(1, count - 1), max_size=2) if count > 1 else st.just([])
    without = set(data.draw(layers))
    required = set(data.draw(layers)) - without
    shipped = Pattern.from_layers(count, set(range(count)) - without)
    rules = Constraints.make(shipped, required)
    full = data.draw(st.integers(rules.fewest, len(shipped.full_layers)))
    matrix = np.random.default_rng(seed).uniform(-1, 1, (count, count))

    def total(text: str) -> float:
        shared = (i for i, c in enumerate(text) if c == "S")
        return float(sum(matrix[layer, source(text, layer)] for layer in shared))

    allowed = [
        text
        for text in every_pattern(count, full)
        if all(text[i] == "F" for i in required) and all(text[i] == "S" for i in without)
    ]
    best = most_similar(matrix, full, rules)
    assert str(best) in allowed
    assert total(str(best)) == pytest.approx(max(map(total, allowed)), abs=1e-12)


def similarities(*lengths: int) -> Floats:
    sequences = [tuple(np.random.default_rng(n).integers(10, 500, n).tolist()) for n in lengths]
    data = Calibration(tuple(sequences), "test")
    ledger = Ledger(TransformersEvaluator(Path(shipped_checkpoint()), data))
    method = METHODS["similarity"]
    assert isinstance(method, Pairwise)
    return pair_matrix(ledger, method)


def test_similarity_is_the_mean_over_all_queries_and_one_where_everything_is_selected() -> None:
    lengths = (120, 70, 60)
    together, alone = similarities(*lengths), [similarities(length) for length in lengths]
    assert together == pytest.approx(np.average(alone, axis=0, weights=lengths), abs=1e-6)
    assert np.array_equal(together, np.tril(together))
    assert np.array_equal(np.diag(together), np.ones(12))
    assert (together[np.tril_indices(12, -1)] < 1).all()
    below = alone[2][np.tril_indices(12)]  # 60 tokens, index_topk 64: each selects all of them
    assert below == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("method", ["proposals", "one-pass", "similarity"])
def test_a_served_model_is_refused_first(method: str) -> None:
    ledger, targets = landscape(12), parse_targets(["1/2"], Constraints.make(Pattern.full(12)))
    with pytest.raises(SearchError, match=r"does not show\. Leave out --url"):
        next(METHODS_OF_SERVERS[method].descend(ledger, targets))
    assert ledger.spent == 0


@pytest.mark.parametrize(("method", "forwards"), [("one-pass", 1), ("similarity", 7)])
def test_its_cost_is_known_before(method: str, forwards: int) -> None:
    goal = parse_targets(["1/2", "1/4"], Constraints.make(Pattern.full(12)))
    assert METHODS[method].least(goal, [100, 100]) == forwards * 200


def test_the_head_that_loses_most_decides_at_a_tenth_of_places_and_in_the_mean() -> None:
    mass = np.random.default_rng(3).uniform(0, 1, (5, 4, 30))
    worst, mean = lost_by_worst_head(mass)
    for j in range(5):
        losses = [mass[4, head] - mass[j, head] for head in range(4)]
        assert mean[j] == pytest.approx(1 - max(each.mean() for each in losses), abs=1e-12)
        tenth = [sorted(each)[26] + 0.1 * (sorted(each)[27] - sorted(each)[26]) for each in losses]
        assert worst[j] == pytest.approx(1 - max(tenth), abs=1e-9)


def test_a_head_that_loses_at_few_places_is_not_hidden_by_the_many() -> None:
    """The mean hid the layer that copies on a novel: 11 points of copying were lost."""
    own, few, all_a_little = np.full((3, 1, 100), 0.9)
    few[0, :12] = 0.1
    all_a_little[0, :] -= 0.1
    worst, mean = lost_by_worst_head(np.stack([few, all_a_little, own]))
    assert mean[0] > mean[1]
    assert worst[0] < worst[1]


@pytest.mark.parametrize(("block", "lists"), [(50, 1), (256, 1), (256, 16)])
def test_attention_on_a_list_is_the_sum_of_its_weights(
    monkeypatch: pytest.MonkeyPatch, block: int, lists: int
) -> None:
    """One head is summed by hand: what layer 5 gives to the best that layers 2 and 5 select."""
    monkeypatch.setattr(hf, "BLOCK", block)
    monkeypatch.setattr(hf, "LISTS", lists)
    ids = tuple(np.random.default_rng(9).integers(10, 500, 130).tolist())
    model = TransformersEvaluator(Path(shipped_checkpoint()), Calibration((ids,), "test"))
    queries = np.flatnonzero(model.calibration.counted[0])
    calls = list[Floats]()

    def note(mass: Floats) -> Floats:
        calls.append(mass)
        return lost_by_worst_head(mass)

    monkeypatch.setattr(hf, "lost_by_worst_head", note)
    model.kept_mass(0)
    of_layer_5 = calls[4].mean(axis=2)  # layer 0 has no other list
    run = model.run(model.own, ids)
    dense = AutoConfig.from_pretrained(shipped_checkpoint(), index_topk=len(ids))
    reference = AutoModelForCausalLM.from_pretrained(
        shipped_checkpoint(), config=dense, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        inputs = reference.model.layers[5].input_layernorm(run.hidden[5])
        places = torch.arange(len(ids))[None]
        mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
        rotary = reference.model.rotary_emb(inputs, places)
        weights = reference.model.layers[5].self_attn(inputs, rotary, mask, position_ids=places)[1]
    for layer in (2, 5):
        best = run.indices[layer][0, queries, : len(ids) // lists].tolist()
        for head in range(weights.shape[1]):
            total = sum(
                float(weights[0, head, query, key])
                for query, keys in zip(queries, best, strict=True)
                for key in keys
            )
            assert of_layer_5[layer, head] == pytest.approx(total / len(queries), abs=1e-5)


@pytest.mark.parametrize(
    ("method", "kind", "words"),
    [
        (
            "one-pass",
            "kept_mass",
            "attention mass that each layer's worst head keeps",
        ),
        ("similarity", "similarity", "similarity of attention outputs"),
    ],
)
def test_a_search_writes_a_pattern_for_each_target_and_measures_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, kind: str, words: str
) -> None:
    arguments = ["search", "run", "--method", method, "--model", str(shipped_checkpoint())]
    arguments += ["--context", "96", "--batches", "2", "--held-out", "2", "--target", "1/2"]
    arguments += ["--target", "1/4", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    names = {"tiny-dsa-1of2": 6, "tiny-dsa-1of4": 3}
    texts = {name: (tmp_path / f"{name}.yaml").read_text() for name in names}
    for name, full in names.items():
        entry = yaml.safe_load(texts[name])
        assert entry["pattern"].count("F") == full
        assert entry["method"]["name"].startswith(words)
        names_of = [measured["benchmark"] for measured in entry["quality"]]
        assert names_of[0].startswith("loss, nats per token (lower is better), held-out documents")
        assert "recall, share of tokens, held-out documents (text, passages, keys)" in names_of
        assert "KL to all F, passages, nats, held-out documents (text, passages, keys)" in names_of
    assert (tmp_path / "pairs.png").stat().st_size > 10_000
    entries = [json.loads(line) for line in (tmp_path / "journal.jsonl").open()][1:]
    assert sum(kind in entry for entry in entries) == 2

    def again(*_: object) -> None:
        raise AssertionError("it was measured before")

    monkeypatch.setattr(TransformersEvaluator, kind, again)
    monkeypatch.setattr(TransformersEvaluator, "changes", again)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert {name: (tmp_path / f"{name}.yaml").read_text() for name in names} == texts


@pytest.mark.parametrize("held_out", [(), ("--held-out", "2")])
def test_patterns_are_there_before_any_loss_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_out: tuple[str, ...]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TransformersEvaluator, "changes", stop)
    arguments = ["search", "run", "--method", "one-pass", "--model", str(shipped_checkpoint())]
    arguments += ["--context", "96", "--batches", "2", "--output", str(tmp_path), *held_out]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code == 0) == (not held_out)
    assert ("nothing was run beside all F: compare" in " ".join(result.output.split())) == (
        not held_out
    )
    assert {path.name for path in tmp_path.glob("*.yaml")} == {
        f"tiny-dsa-1of{divisor}.yaml" for divisor in (2, 4, 8)
    }
    entry = yaml.safe_load((tmp_path / "tiny-dsa-1of4.yaml").read_text())
    assert entry["method"]["name"].startswith("attention mass")
    assert "quality" not in entry
    assert "objective" not in entry["method"]
    shown = CliRunner().invoke(app, ["patterns", "show", str(tmp_path / "tiny-dsa-1of4.yaml")])
    assert "minimising" not in shown.output
    summary = json.loads((tmp_path / "search.json").read_text(), parse_constant=pytest.fail)
    assert [mark["loss"] for mark in summary["marks"]] == [None] * 3
    assert (tmp_path / "pairs.png").exists()
