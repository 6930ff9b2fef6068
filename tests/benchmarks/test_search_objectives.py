"""What the study of objectives computes itself: ranks, masks, objectives, a task, measures."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import search_objectives
from benchmarks.search_objectives import (
    CHECKPOINT,
    USERS_TASKS,
    Documents,
    Setting,
    Study,
    compare,
    correlation,
    every_pattern,
    masks,
    spearman,
)
from sglang_indexcache.data.retrieval import TaskDocument
from sglang_indexcache.hf import share
from sglang_indexcache.pattern import Pattern

LENGTH = 200
TOPK = 12


@pytest.fixture(scope="module")
def documents() -> Documents:
    return Documents(LENGTH)


@given(st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=3, max_size=30))
def test_the_rank_correlation_is_scipys(pairs: list[tuple[int, int]]) -> None:
    first, second = np.array(pairs, dtype=float).T
    if len(set(first)) > 1 and len(set(second)) > 1:
        assert spearman(first, second) == pytest.approx(stats.spearmanr(first, second).statistic)
    else:
        assert math.isnan(spearman(first, second))


def test_an_interval_holds_its_correlation_and_closes_on_a_perfect_one() -> None:
    print("seed 3")
    draw = np.random.default_rng(3)
    first = draw.normal(size=40)
    perfect = correlation(first, -np.exp(first))
    assert perfect == pytest.approx({"rho": -1, "low": -1, "high": -1})
    rough = correlation(first, first + 2 * draw.normal(size=40))
    assert -1 < rough["low"] < rough["rho"] < rough["high"] < 1


@given(st.lists(st.booleans(), min_size=2, max_size=40), st.integers(0, 40))
def test_masks_count_what_they_say(answer: list[bool], topk: int) -> None:
    document = TaskDocument(list(range(len(answer))), answer, answer)
    found = masks(document, topk)
    for token in range(1, len(answer)):
        visible = list(range(token))  # what the query that predicts this token sees
        counts = len(visible) > topk
        assert found["all"][token - 1] == counts
        assert found["late"][token - 1] == (counts and visible[-1] >= len(answer) / 2 - 0.5)
        assert found["answers"][token - 1] == (counts and answer[token])


def test_objectives_against_their_definitions() -> None:
    print("seed 5")
    draw = np.random.default_rng(5)
    logits = draw.normal(size=(2, 6, 9))
    found, full = (torch.tensor(each).log_softmax(-1) for each in logits)
    targets = torch.tensor([0, 1, 2, 3, 4, 8])
    objectives = compare(found, full, targets)
    p, q = (np.exp(each) / np.exp(each).sum(-1, keepdims=True) for each in (logits[1], logits[0]))
    loss = [-math.log(row[target]) for row, target in zip(q, targets.tolist(), strict=True)]
    for name in ("all", "late", "answers"):
        assert objectives[name].tolist() == pytest.approx(loss)
    for name in ("kl", "late_kl"):
        assert objectives[name].numpy() == pytest.approx(stats.entropy(p, q, axis=-1))
    assert objectives["late_top1"].tolist() == (p.argmax(-1) != q.argmax(-1)).tolist()
    assert not compare(full, full, targets)["kl"].any()


def test_a_reader_of_the_text_answers_every_interleaved_question(documents: Documents) -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    for row in range(5):
        document = documents.held_out("interleaved", row)
        assert len(document) == len(document.answer) == LENGTH
        asked = [place for place, answer in enumerate(document.answer) if answer]
        assert len(asked) == LENGTH // 40
        for place in asked:
            assert place > LENGTH // 2
            before = tokenizer.decode(document.ids[:place])
            [name] = re.findall(r"\n\? (\w+) is$", before)
            [value] = re.findall(rf"\n# {name} is( \w+)\n", before)
            assert value == tokenizer.decode(document.ids[place])


def test_chance_is_one_of_the_values_that_a_document_states(documents: Documents) -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    for task in USERS_TASKS:
        document = documents.held_out(task, 0)
        text = tokenizer.decode(document.ids)
        if task == "recall":
            stated = text[: text.index("\n?")].count(",")
        else:
            stated = len(set(re.findall(r"\n# (\w+) is \w+\n", text)))
        assert documents.chance(task, document) == pytest.approx(1 / stated)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_pattern_is_listed_once(count: int) -> None:
    found = every_pattern(7, count)
    assert len(set(found)) == len(found) == math.comb(6, count - 1)
    assert all(p.is_full(0) and len(p.full_layers) == count for p in found)


def test_a_study_measures_what_a_starved_model_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting("small", LENGTH, TOPK, batches=1, patterns=3, rows=1)
    study = Study(setting, tmp_path)
    pattern = Pattern("FFSSSSFSSSSS")
    sums = study.calibrated(pattern, "recall", 0)
    accuracy = study.accuracy(pattern, "needles", 0)

    calibration = study.documents.calibration("recall", 0)
    counted = masks(calibration, TOPK)
    logits = _logits(pattern, calibration.ids)
    targets = torch.tensor(calibration.ids[1:])
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    for name, mask in counted.items():
        assert sums[name] == pytest.approx(float(losses[mask].sum()), rel=1e-4)
        assert sums[f"count {name}"] == int(mask.sum()) > 0
    needles = study.documents.held_out("needles", 0)
    right = _logits(pattern, needles.ids).argmax(-1) == torch.tensor(needles.ids[1:])
    assert accuracy == right[torch.tensor(needles.answer[1:])].float().mean()

    # What was measured is read again, not measured again.
    monkeypatch.setattr(search_objectives, "Model", None)
    again = Study(setting, tmp_path)
    assert again.calibrated(pattern, "recall", 0) == sums
    assert again.accuracy(pattern, "needles", 0) == accuracy


def _logits(pattern: Pattern, ids: list[int]) -> torch.Tensor:
    """``[length - 1, vocabulary]`` by transformers alone, of a model that selects :data:`TOPK`."""
    model = AutoModelForCausalLM.from_pretrained(
        CHECKPOINT, dtype=torch.float32, attn_implementation="eager"
    )
    for layer in model.model.layers:
        layer.self_attn.indexer.index_topk = TOPK
    with torch.no_grad(), share(model, pattern):
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
    return logits
