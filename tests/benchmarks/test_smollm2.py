"""The conversion of a Llama to DSA, and the lean forward, on a random model of two layers."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.random_model import make_tokenizer, save_checkpoint
from benchmarks.smollm2 import model_parser
from benchmarks.smollm2.books import with_passages
from benchmarks.smollm2.convert import Form, convert, dsa_config, original_frequencies
from benchmarks.smollm2.evaluator import LeanEvaluator
from benchmarks.smollm2.indexers import Layer, Recipe, collect, copy_attention
from benchmarks.smollm2.lean import Lean
from benchmarks.smollm2.measure import Arm, measure
from benchmarks.smollm2.searched import RATIOS, search
from sglang_indexcache.hf import share
from sglang_indexcache.lab.search.calibration import Calibration
from sglang_indexcache.lab.search.evaluators.hf import TransformersEvaluator
from sglang_indexcache.lab.search.lists import OverlapCounter
from sglang_indexcache.lab.search.rules import Constraints
from sglang_indexcache.pattern import Pattern

TOPK = 16


@pytest.fixture(scope="module")
def llama() -> Any:
    return random_llama(layers=2)


def random_llama(layers: int) -> Any:
    """Six query heads in three groups of 16; norms whose gains are not 1."""
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        rms_norm_eps=1e-12,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.15,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    return model


@pytest.fixture(scope="module")
def converted(llama: Any) -> Any:
    torch.manual_seed(1)
    return convert(llama, dsa_config(llama.config, index_heads=6, index_topk=TOPK))


@pytest.fixture(scope="module")
def folder(converted: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("converted")
    save_checkpoint(converted, make_tokenizer(300), "float32", path)
    return path


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 300, (96,), generator=torch.Generator().manual_seed(2))


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(ids[None], use_cache=False).logits[0]
    return result


def test_conversion_is_exact_with_the_originals_frequencies(llama: Any, ids: torch.Tensor) -> None:
    config = dsa_config(llama.config, index_heads=2, index_topk=len(ids))
    model = convert(llama, config)
    assert (logits(model, ids) - logits(llama, ids)).abs().max() > 1e-3  # RoPE is another
    model.model.rotary_emb.inv_freq = original_frequencies(llama.config)
    torch.testing.assert_close(logits(model, ids), logits(llama, ids), atol=2e-5, rtol=1e-5)


def test_each_group_has_nearly_the_ladder_it_was_trained_with_scaled(llama: Any) -> None:
    config = dsa_config(llama.config, index_heads=2, index_topk=TOPK)
    form = Form.of(llama.config)
    base, new = original_frequencies(llama.config), config.rope_parameters["rope_theta"]
    ladder = new ** (-torch.arange(0, form.rope, 2) / form.rope)
    for group in range(form.groups):
        slots = form.places(group)[::2] // 2
        scales = ladder[slots] / base[slots]
        steps = scales[1:] / scales[:-1]
        assert (steps - 1).abs().max() < 0.03


def test_lean_forward_is_transformers_own(converted: Any, folder: Path, ids: torch.Tensor) -> None:
    lean = Lean(folder, torch.float32)
    for pattern in (Pattern("FF"), Pattern("FS")):
        with share(converted, pattern):
            expected = logits(converted, ids)
        places = torch.arange(1, len(ids))
        loss, right = lean.losses(lean.hidden(ids, pattern), ids, places)
        expected_loss = torch.nn.functional.cross_entropy(expected[:-1], ids[1:], reduction="none")
        torch.testing.assert_close(loss, expected_loss, atol=2e-5, rtol=1e-5)
        assert right.equal(expected[:-1].argmax(-1) == ids[1:])


def test_a_forward_in_bfloat16_is_near(folder: Path, ids: torch.Tensor) -> None:
    """All tokens are attended to: which ones random indexers select hangs on the last bits."""
    parser = model_parser(None)
    models = [
        Lean.of_study(parser.parse_args([str(folder), *words]))
        for words in ([], ["--dtype", "bfloat16"])
    ]
    exact, rounded = (model.logits(model.hidden(ids)).log_softmax(-1) for model in models)
    difference = (rounded - exact).abs()
    assert 0 < difference.mean() < 0.02 * exact.std()


def test_adopted_indexers_select_as_in_transformers(
    converted: Any, folder: Path, ids: torch.Tensor
) -> None:
    generator = torch.Generator().manual_seed(7)
    indexers = {
        name: torch.randn(tensor.shape, generator=generator) * 0.2
        for name, tensor in converted.state_dict().items()
        if ".layers.1." in name and ".indexer." in name
    }
    lean, pattern, places = Lean(folder, torch.float32), Pattern("FF"), torch.arange(1, len(ids))
    before = lean.losses(lean.hidden(ids, pattern), ids, places)[0]
    lean.adopt(indexers)
    loss = lean.losses(lean.hidden(ids, pattern), ids, places)[0]
    model = copy.deepcopy(converted)
    model.load_state_dict(indexers, strict=False)
    expected = torch.nn.functional.cross_entropy(logits(model, ids)[:-1], ids[1:], reduction="none")
    torch.testing.assert_close(loss, expected, atol=2e-5, rtol=1e-5)
    assert (loss - before).abs().max() > 1e-2


def test_lean_forward_goes_on_in_the_middle(folder: Path, ids: torch.Tensor) -> None:
    lean, pattern = Lean(folder, torch.float32), Pattern("FS")
    states: list[Any] = []
    stream = lean.hidden(ids, pattern, note=lambda *state: states.append(state))
    assert lean.hidden(ids, pattern, start=states[1]).equal(stream)


def test_copied_indexer_captures_the_attention_and_training_lowers_its_loss(
    converted: Any, folder: Path
) -> None:
    lean = Lean(folder, torch.float32)
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, 300, (128,), generator=generator) for _ in range(2)]
    reads = collect(lean, rows)
    attention = converted.model.layers[1].self_attn
    copy_attention(attention.indexer, attention, lean.form, reads[0][1].float())
    layer = Layer(lean, 1, attention.indexer, [read[1] for read in reads])
    copied, most = layer.captured(0, TOPK)
    assert copied > 0.8 * most
    losses = layer.train(Recipe(steps=24, queries=48, rate=2e-3, sparse_steps=4, topk=TOPK), seed=0)
    assert sum(losses[18:24]) < 0.9 * sum(losses[:6])
    assert layer.captured(0, TOPK)[0] > copied


def test_passages_come_again_where_they_are_counted() -> None:
    text = torch.arange(5000)
    row = with_passages(text, 2048, seed=4)
    assert len(row.ids) == 2048
    counted = row.ids[row.recall]
    assert row.ids[:1536].equal(text[:1536])
    assert set(counted.tolist()) <= set(text[:1536].tolist())
    assert len(row.recall) == 8 * 48
    assert row.recall.max() == 2047
    assert (row.text.min(), row.text.max()) == (768, 1535)


def test_workers_stop_with_who_asked_them(tmp_path: Path) -> None:
    """Items in hand are finished, and none that nobody will read is begun."""
    script = """
import sys, time
from pathlib import Path
from benchmarks.smollm2.workers import each
def work(number):
    time.sleep(0.05)
    Path(sys.argv[1], str(number)).touch()
    return number
for number in each(work, range(60)):
    raise KeyboardInterrupt
"""
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], stderr=subprocess.PIPE)
    assert b"KeyboardInterrupt" in ended.stderr
    assert 0 < len(list(tmp_path.iterdir())) < 30


def test_an_interrupted_measurement_goes_on_where_it_stopped(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its workers are forked, which a process that has computed with several threads must not do.
    monkeypatch.setattr("benchmarks.smollm2.measure.each", lambda work, items, _: map(work, items))
    lean, arms = Lean(folder, torch.float32), [Arm("all F", Pattern("FF"), TOPK), Arm("dense")]
    text = torch.randint(3, 300, (256,), generator=torch.Generator().manual_seed(4))
    row, log = with_passages(text, 256, seed=0), list[str]()
    expected = measure(lean, arms, [row], tmp_path, "digest", log.append)
    assert len(log) == len(arms)
    (journal,) = tmp_path.rglob("*.jsonl")
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])  # killed within the last line
    log.clear()
    assert measure(lean, arms, [row], tmp_path, "digest", log.append) == expected
    assert len(log) == 1
    # Passages in another order make another row, though it begins alike.
    other = replace(row, ids=torch.cat([row.ids[:200], row.ids[200:].flip(0)]))
    measure(lean, arms, [other], tmp_path, "digest", log.append)
    assert len(log) == 1 + len(arms)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a converted model of five layers with random indexers."""
    llama = random_llama(layers=5)
    torch.manual_seed(5)
    model = convert(llama, dsa_config(llama.config, index_heads=6, index_topk=TOPK))
    path = tmp_path_factory.mktemp("deep")
    save_checkpoint(model, make_tokenizer(300), "float32", path)
    return path


@pytest.fixture
def searched(deep: Path) -> LeanEvaluator:
    generator = torch.Generator().manual_seed(6)
    rows = [
        with_passages(torch.randint(3, 300, (256,), generator=generator), 256, seed=seed)
        for seed in range(2)
    ]
    return LeanEvaluator(Lean(deep, torch.float32), rows, "mixed")


def test_a_searchs_evaluator_gives_what_a_fresh_forward_gives(searched: LeanEvaluator) -> None:
    model = searched.model
    for layers in ("FFFFF", "FFFFS", "FSFFF", "FFSFF", "FSSFF", "FFFFS", "FSSSS"):
        pattern = Pattern(layers)
        for batch, row in enumerate(searched.rows):
            places = torch.cat([row.text, row.recall])
            loss, _ = model.losses(model.hidden(row.ids, pattern), row.ids, places)
            assert searched.loss(pattern, [batch])[0] == float(loss.double().mean())


@pytest.mark.parametrize("method", ["one-pass", "greedy"])
def test_a_study_has_the_losses_of_what_a_search_chose(
    searched: LeanEvaluator, method: str, tmp_path: Path
) -> None:
    """One pass chooses without measuring any, so its losses are asked for afterwards."""
    rules = Constraints.make(Pattern.full(5))
    record = search(searched, method, tmp_path / "journal.jsonl", "digest", rules)
    assert set(record["patterns"]) == set(record["losses"]) == set(RATIOS)
    for label, letters_of_it in record["patterns"].items():
        own = searched.loss(Pattern(letters_of_it), range(2)).mean()
        assert record["losses"][label] == pytest.approx(own, abs=1e-12)
    assert (record["of_greedy"] == 1) is (method == "greedy")


def test_pairs_of_layers_compare_as_in_transformers(
    searched: LeanEvaluator, deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rows as long as transformers', so that torch.topk takes the same ones of equal scores.
    monkeypatch.setattr("benchmarks.smollm2.lean.BLOCK", 256)
    ids = tuple(searched.rows[1].ids.tolist())
    data = SimpleNamespace(sequences=[ids], batch_tokens=(len(ids),))
    reference = TransformersEvaluator(deep, cast("Calibration", data))
    # Two forwards round differently, so a few queries select another last token.
    np.testing.assert_allclose(searched.similarity(1), reference.similarity(0), atol=1e-3)
    counted = np.zeros(len(ids) - 1, dtype=bool)
    counted[torch.cat([searched.rows[1].text, searched.rows[1].recall]) - 1] = True
    data.counted = [counted]
    np.testing.assert_allclose(searched.kept_mass(1), reference.kept_mass(0), atol=2e-3)
    data.kinds = [searched.rows[1].kinds]
    pattern = Pattern("FFSFS")
    [mine], [its] = searched.judge(pattern, [1]), reference.judge(pattern, [0])
    assert mine.loss == pytest.approx(its.loss, abs=1e-3)
    for field in ("losses", "kl", "kept", "right"):
        assert getattr(mine, field) == pytest.approx(getattr(its, field), abs=0.02)
    counter = OverlapCounter(5, TOPK)
    counter.add(torch.cat(reference.run(reference.own, ids).indices).numpy())
    np.testing.assert_allclose(searched.overlap(1), counter.matrix(), atol=2e-3)
