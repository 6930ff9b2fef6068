"""A search over F, L and S: its programme against all patterns, its masses and losses by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.cli import app
from sglang_indexcache.demo import shipped_checkpoint
from sglang_indexcache.errors import PatternError, SearchError
from sglang_indexcache.library import Library, Slopes
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.calibration import Calibration
from sglang_indexcache.search.evaluators import Floats, hf
from sglang_indexcache.search.evaluators.hf import TransformersEvaluator
from sglang_indexcache.search.ledger import Ledger, open_journal
from sglang_indexcache.search.methods import METHODS_IN_PROCESS
from sglang_indexcache.search.methods.pairwise import most_similar, pair_matrix
from sglang_indexcache.search.options import Options
from sglang_indexcache.search.rules import Constraints, Folding, parse_targets
from tests.oracle import Oracle
from tests.search.helpers import finished
from tests.search.test_fold_slopes import products
from tests.slopes import random_slopes

LENGTH, TOPK, LAYERS = 150, 64, 6
EXACT = 3
"""A layer that folds badly."""


# -- the programme --------------------------------------------------------------------------------


def mass_kept(text: str, matrix: Floats) -> float:
    """Sum what every layer keeps, one after the other; an F layer keeps all."""
    count, total, column = len(text), 0.0, 0
    for layer, letter in enumerate(text):
        if letter != "S":
            column = layer + (count if letter == "F" else 0)
        total += 1.0 if letter == "F" else float(matrix[layer, column])
    return total


def cost(text: str, price: Fraction) -> Fraction:
    return text.count("F") + price * text.count("L")


@settings(deadline=None, max_examples=150)
@given(count=st.integers(1, 7), seed=st.integers(0, 10**6), data=st.data())
def test_the_pattern_is_the_best_of_all_that_the_budget_allows(
    count: int, seed: int, data: st.DataObject
) -> None:
    some = st.lists(st.integers(1, count - 1), max_size=2) if count > 1 else st.just([])
    without = set(data.draw(some))
    fixed = {0, *data.draw(some)} - without
    folds = set(range(count)) - set(data.draw(some))
    price = Fraction(data.draw(st.integers(1, 12)), 12)
    shipped = Pattern.from_layers(count, set(range(count)) - without)
    rules = Constraints.make(shipped, fixed, Folding(price, frozenset(folds), "0123456789ab"))
    budget = data.draw(st.integers(rules.fewest, len(shipped.full_layers)))
    # More than 1 now and then: the heads of some layers gain under another's list.
    matrix = np.random.default_rng(seed).uniform(0, 1.05, (count, 2 * count))
    allowed = [
        text
        for text in map("".join, itertools.product("FLS", repeat=count))
        if cost(text, price) <= budget
        and all(text[layer] == "F" for layer in fixed)
        and all(text[layer] == "S" for layer in without)
        and all(letter != "L" or layer in folds for layer, letter in enumerate(text))
    ]
    best_pattern = most_similar(matrix, budget, rules)
    assert best_pattern.layers in allowed
    assert best_pattern.suffix.slopes == ("0123456789ab" if "L" in best_pattern.layers else "")
    best = max(mass_kept(text, matrix) for text in allowed)
    assert mass_kept(best_pattern.layers, matrix) == pytest.approx(best, abs=1e-12)


def test_of_patterns_as_good_the_cheapest_is_taken() -> None:
    rules = Constraints.make(Pattern.full(4), (), Folding(Fraction("0.3"), frozenset(range(4))))
    assert str(most_similar(np.ones((4, 8)), 3, rules)) == "FSSS"
    apart = np.hstack([np.eye(4), np.eye(4)])  # a layer keeps all on its folded list, else nothing
    assert str(most_similar(apart, 2, rules)) == "FLLL"  # 1.9


def test_prices_that_are_no_sums_of_halves_are_exact() -> None:
    """Three times 0.1 is more than 0.3 in floating point."""
    apart = np.hstack([np.eye(11), np.eye(11)])
    rules = Constraints.make(Pattern.full(11), (), Folding(Fraction("0.1"), frozenset(range(11))))
    assert str(most_similar(apart, 2, rules)) == "F" + 10 * "L"


@pytest.mark.parametrize("price", ["0", "1.01", "-1"])
def test_a_price_at_which_nobody_would_search_is_refused(price: str) -> None:
    with pytest.raises(SearchError, match="above 0 and at most 1"):
        Folding(Fraction(price), frozenset())


# -- the evaluator --------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["glm-5", "deepseek-v3.2"])
def folder(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Path:
    return checkpoints[request.param]


@pytest.fixture(scope="module")
def slopes(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Slopes:
    path = tmp_path_factory.mktemp("slopes") / "some.slopes"
    return random_slopes(folder, path, exact=[EXACT])


@pytest.fixture(scope="module")
def data() -> Calibration:
    draw = np.random.default_rng(0)
    sequences = tuple(tuple(draw.integers(10, 512, LENGTH).tolist()) for _ in range(2))
    counted = tuple(np.arange(LENGTH - 1) >= at for at in (TOPK, 100))
    return Calibration(sequences, 2, "test", counted=counted)


def lists_by_hand(
    folder: Path, slopes: Sequence[Any], ids: tuple[int, ...], count: int
) -> list[list[set[int]]]:
    """Return by layer and query the best tokens by a sum over heads, from transformers' products.

    Of a layer without slopes they are those of its own score.
    """
    lists = []
    for (products_of, weights, exact), numbers in zip(products(folder, ids), slopes, strict=True):
        scores = exact
        if numbers is not None:
            per_head = products_of * np.array(numbers)[None, :, None] * weights[:, :, None]
            scores = per_head.sum(axis=1)
        order = [
            sorted(range(query + 1), key=lambda key: (-row[key], key))[:count]
            for query, row in enumerate(scores.tolist())
        ]
        lists.append([set(keys) for keys in order])
    return lists


def dense_attention(folder: Path, hidden: list[torch.Tensor], layer: int) -> torch.Tensor:
    """``[heads, length, length]``: a layer's weights if it attended to all that it sees."""
    config = AutoConfig.from_pretrained(folder, index_topk=LENGTH)
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        block = model.model.layers[layer]
        read, places = block.input_layernorm(hidden[layer]), torch.arange(LENGTH)[None]
        mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None]
        turned = model.model.rotary_emb(read, places)
        weights: torch.Tensor = block.self_attn(read, turned, mask, position_ids=places)[1]
    return weights[0]


@pytest.mark.parametrize("lists", [1, 16])
def test_the_matrix_is_that_of_sums_by_hand(
    folder: Path, slopes: Slopes, data: Calibration, monkeypatch: pytest.MonkeyPatch, lists: int
) -> None:
    monkeypatch.setattr(hf, "LISTS", lists)
    best = min(TOPK, LENGTH // lists)
    model = TransformersEvaluator(folder, data, slopes=slopes)
    matrix = model.folded_mass(0)
    assert matrix.shape == (LAYERS, 2 * LAYERS)
    assert matrix[:, LAYERS:] == pytest.approx(model.kept_mass(0), abs=1e-12)
    runs = [model.run(model.own, ids) for ids in data.sequences]
    folded = [lists_by_hand(folder, slopes.by_layer, ids, best) for ids in data.sequences]
    own = [lists_by_hand(folder, [None] * LAYERS, ids, best) for ids in data.sequences]
    for layer in (1, 4):
        attention = [dense_attention(folder, run.hidden, layer) for run in runs]
        own_mass, mass_of_others = 0.0, [0.0] * (layer + 1)
        for number, (mask, run) in enumerate(zip(data.counted, runs, strict=True)):
            for query in np.flatnonzero(mask).tolist():
                weights = attention[number][:, query]
                keys = own[number][layer][query]
                if lists == 1:  # the last of whole lists are equal scores, in any order
                    keys = set(run.indices[layer][0, query].tolist())
                own_mass += weights[:, sorted(keys)].sum(-1).double()
                for j in range(layer + 1):
                    mass_of_others[j] += (
                        weights[:, sorted(folded[number][j][query])].sum(-1).double()
                    )
        total = sum(int(mask.sum()) for mask in data.counted)
        for j in range(layer + 1):
            lost = max(((own_mass - mass_of_others[j]) / total).tolist())
            assert matrix[layer, j] == pytest.approx(1 - lost, abs=1e-5)
    above = np.triu_indices(LAYERS, 1)
    assert not matrix[:, :LAYERS][above].any()
    assert matrix[EXACT, EXACT] == matrix[EXACT, LAYERS + EXACT] == 1


def test_losses_of_folded_patterns_are_the_oracles(
    folder: Path, slopes: Slopes, data: Calibration
) -> None:
    oracle = Oracle(folder, torch.float32, first_of_ties=False)
    oracle.slopes = list(slopes.by_layer)
    reusing = TransformersEvaluator(folder, data, slopes=slopes)
    plain = TransformersEvaluator(folder, data, reuse_bytes=0, slopes=slopes)
    assert slopes.digest in reusing.kind
    for text in ("FFFFFF", "FFLFFF", "FSLFSS", "FSLFLL", "FSFFSS", "FLSFSL", "FLLFFF"):
        pattern = Pattern(text + (f"@{slopes.digest}" if "L" in text else ""))
        mine = reusing.loss(pattern, [0])
        assert np.array_equal(mine, plain.loss(pattern, [0]))
        answers = [oracle.answer(list(ids), pattern).logprobs for ids in data.sequences]
        losses = [-row[torch.from_numpy(m)] for row, m in zip(answers, data.counted, strict=True)]
        assert mine == pytest.approx(float(torch.cat(losses).mean()), abs=1e-5)
    assert reusing.layer_tokens < plain.layer_tokens


def test_other_slopes_and_none_are_refused(folder: Path, slopes: Slopes, data: Calibration) -> None:
    for model in (
        TransformersEvaluator(folder, data),
        TransformersEvaluator(folder, data, slopes=slopes),
    ):
        with pytest.raises(PatternError, match="folds indexers, which a search without its slopes"):
            model.loss(Pattern("FLLFFF@0123456789ab"), [0])


def test_a_search_ends_with_letters_and_measures_nothing_twice(
    folder: Path, slopes: Slopes, data: Calibration, tmp_path: Path
) -> None:
    folding = Folding(Fraction("0.25"), frozenset({1, 2, 4, 5}), slopes.digest)
    goal = parse_targets(["1/2", "1/3"], Constraints.make(Pattern.full(LAYERS), [4], folding))
    options = Options(METHODS_IN_PROCESS["one-pass"], refine=False)
    cut = Calibration(data.sequences, 1, "test")
    patterns = []
    for _ in range(2):
        model = TransformersEvaluator(folder, cut, slopes=slopes)
        with open_journal(tmp_path / "journal.jsonl", {"kind": model.kind}) as journal:
            search = finished(Ledger(model, journal), goal, options)
            matrix = pair_matrix(search.ledger, "folded_mass")
        patterns.append(search.found)
        last = model.layer_tokens
    assert last == 0
    assert [result.pattern for result in patterns[0].values()] == [
        result.pattern for result in patterns[1].values()
    ]
    assert matrix == pytest.approx((model.folded_mass(0) + model.folded_mass(1)) / 2, abs=1e-15)
    for count, result in patterns[0].items():
        assert result.pattern == most_similar(matrix, count, goal.constraints)
        assert result.pattern.layers[EXACT] != "L"
        assert result.pattern.layers[4] == "F"
        assert cost(result.pattern.layers, folding.price) <= count
        assert np.isnan(result.loss)
    assert search.budget.total == search.search_tokens == 3 * 2 * LENGTH


# -- the command ----------------------------------------------------------------------------------


def call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["search", "run", *map(str, arguments)])
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Slopes:
    folder = tmp_path_factory.mktemp("shipped")
    return random_slopes(Path(shipped_checkpoint()), folder / "its.slopes", exact=[EXACT])


def test_the_command_writes_patterns_that_find_their_slopes(
    tmp_path: Path, shipped: Slopes
) -> None:
    model = shipped_checkpoint()
    arguments = ("--model", model, "--slopes", shipped.path, "--fold-price", "0.3", "--context")
    arguments += ("128", "--batches", "2", "--held-out", "2", "--target", "1/2", "--target", "1/4")
    code, output = call(*arguments, "--output", tmp_path)
    assert code == 0, output
    assert "F costs 1, L 0.3, S 0: a target is the most that a pattern may cost" in output
    assert "11 of 12 layers may be L" in output
    for label, budget in (("1of2", 6), ("1of4", 3)):
        path = tmp_path / f"tiny-dsa-FLS-{label}.yaml"
        resolved = Library([]).resolve(str(path), Checkpoint.read(Path(model)), folding=True)
        letters = resolved.pattern.layers
        assert {"F", "L"} <= set(letters)
        assert cost(letters, Fraction("0.3")) <= budget
        assert resolved.slopes is not None
        assert resolved.slopes.digest == shipped.digest
        assert resolved.entry is not None
        assert resolved.entry.retention == f"{12 - letters.count('S')}/12"
        assert resolved.entry.method.details["fold_price"] == 0.3
        assert f"{letters.count('F')} + {letters.count('L')} L" in output
    assert (tmp_path / "pairs.png").stat().st_size > 10_000
    journal = (tmp_path / "journal.jsonl").read_bytes()
    code, output = call(*arguments, "--output", tmp_path, "--fold-price", "0.5")
    assert code == 0, output
    assert (tmp_path / "journal.jsonl").read_bytes().startswith(journal)
    assert (tmp_path / "journal.jsonl").read_text().count("folded_mass") == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--slopes", "FILE"), "L layers need both their slopes"),
        (("--fold-price", "0.3"), "L layers need both their slopes"),
        (("--slopes", "FILE", "--fold-price", "1.5"), "above 0 and at most 1"),
        (("--slopes", "no.slopes", "--fold-price", "0.5"), "cannot read the slopes no.slopes"),
        (("--slopes", "FILE", "--fold-price", "0.5", "--method", "fast"), "say one-pass"),
        (("--slopes", "FILE", "--fold-price", "0.5", "--url", "http://h"), "Leave out --url"),
    ],
)
def test_what_it_refuses(
    tmp_path: Path, shipped: Slopes, more: tuple[str, ...], message: str
) -> None:
    named = [str(shipped.path) if option == "FILE" else option for option in more]
    code, output = call("--model", shipped_checkpoint(), "--output", tmp_path / "out", *named)
    assert (code, message in output) == (1, True), output
    assert not (tmp_path / "out").exists()


def test_slopes_of_another_checkpoint_are_refused(
    tmp_path: Path, folder: Path, slopes: Slopes
) -> None:
    options = ("--slopes", slopes.path, "--fold-price", "0.5", "-o", tmp_path)
    code, output = call("--model", shipped_checkpoint(), *options)
    assert (code, "is another checkpoint" in output) == (1, True), output
