"""``heal`` from its files to an adapter."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from sglang_indexcache.errors import (
    CheckpointError,
    IndexCacheError,
    PatternError,
    TrainingError,
)
from sglang_indexcache.lab.heal import heal as heal_module
from sglang_indexcache.lab.heal.heal import HealOptions, HealResult, heal
from sglang_indexcache.lab.heal.run_folder import read_metrics
from sglang_indexcache.library.digest import checkpoint_digest
from sglang_indexcache.serving.adapters.folder import Adapter
from tests.cli.test_search import TINY
from tests.lab.heal.checkpoints import checkpoint, quantise

SMALL: dict[str, Any] = {
    "pattern": "FSSF",
    "data": ("machine",),
    "length": 24,
    "rows": 3,
    "dense_steps": 3,
    "sparse_steps": 2,
    "lr": 5e-3,
    "held_out": 2,
    "evaluate_every": 2,
    "save_every": 1,
    "dtype": "float32",
}


def options(folder: Path, **changes: Any) -> HealOptions:
    """Return options for the checkpoint under ``folder``."""
    return HealOptions(
        **{"checkpoint": folder / "base", "output": folder / "adapter", **SMALL, **changes}
    )


@pytest.fixture(scope="module")
def healed_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[HealResult, Path]:
    """Return the shipped checkpoint, healed for a few steps."""
    folder = tmp_path_factory.mktemp("learned")
    return heal(eight_steps(folder)), folder


def eight_steps(folder: Path) -> HealOptions:
    """Return options for eight steps on the shipped checkpoint."""
    sizes = {"rows": 2, "dense_steps": 8, "evaluate_every": 8, "held_out": 4}
    output = folder / "adapter"
    return HealOptions(TINY, "uniform:1/2", ("machine",), output, lr=5e-3, dtype="float32", **sizes)


def test_the_loss_falls_and_the_recall_rises(healed_run: tuple[HealResult, Path]) -> None:
    before, after = healed_run[0].evaluations
    assert after.held_out_loss < 0.9 * before.held_out_loss
    assert after.held_out_recall > before.held_out_recall
    assert (before.total_step, after.total_step) == (0, 8)


def test_a_run_is_told_in_sentences(tmp_path: Path) -> None:
    text = io.StringIO()
    changes = {"dense_steps": 2, "evaluate_every": 2}
    result = heal(replace(eight_steps(tmp_path), **changes), Console(file=text, width=200))
    lines = text.getvalue().splitlines()
    first, last = result.evaluations
    assert "total_step" not in text.getvalue()
    assert str(first) in lines
    assert str(first).startswith("dense attention, step 0: held-out loss ")
    assert any(line.startswith("dense attention, step 2 of 2: loss ") for line in lines)
    assert lines[-2] == (
        f"dense attention: held-out loss {first.held_out_loss:.4g} -> {last.held_out_loss:.4g}, "
        f"recall {100 * first.held_out_recall:.1f} -> {100 * last.held_out_recall:.1f} %"
    )
    output = tmp_path / "adapter"
    assert (
        text.getvalue()
        .replace("\n", "")
        .endswith(f"wrote {output}; serve it: --indexcache-adapter {output}")
    )


def test_what_is_written(healed_run: tuple[HealResult, Path]) -> None:
    result, folder = healed_run
    assert Adapter.read(folder / "adapter") == result.adapter
    result.adapter.check(TINY)
    assert {t.dtype for t in result.adapter.tensors().values()} == {torch.bfloat16}
    base = load_file(TINY / "model.safetensors")
    changed = {n for n, t in result.adapter.tensors().items() if not torch.equal(t, base[n])}
    assert {n.split(".")[2] for n in changed} == {"0", "2", "4", "6", "8", "10"}
    run = folder / "adapter.run"
    lines = read_metrics(run)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 9))


def test_a_finished_run_is_left_as_it_is(healed_run: tuple[HealResult, Path]) -> None:
    result, folder = healed_run
    assert heal(eight_steps(folder)) == result


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a folder with a small random checkpoint in it."""
    checkpoint(tmp_path / "base")
    return tmp_path


class StoppedError(Exception):
    """Stand-in for whatever ends a process."""


def interrupted(settings: HealOptions, after: int) -> HealResult:
    """Stopped after a step, then started again."""

    def stop(step: int, _: Any) -> None:
        if step == after:
            raise StoppedError

    with pytest.raises(StoppedError):
        heal(settings, on_step=stop)
    return heal(settings)


@pytest.mark.parametrize("lengths", [{}, {"sparse_length": 40}])
def test_interrupted_after_any_step_it_ends_the_same(base: Path, lengths: dict[str, int]) -> None:
    undisturbed = heal(options(base, **lengths))
    log = read_metrics(base / "adapter.run")
    for step in range(1, SMALL["dense_steps"] + SMALL["sparse_steps"] + 1):
        output = base / f"stopped-{step}"
        resumed = interrupted(options(base, output=output, save_every=2, **lengths), step)
        for name in ("indexers.safetensors", "adapter.yaml"):
            assert (output / name).read_bytes() == (base / "adapter" / name).read_bytes()
        assert resumed.evaluations == undisturbed.evaluations
        for ours, theirs in zip(read_metrics(base / f"stopped-{step}.run"), log, strict=True):
            assert without_time(ours) == without_time(theirs)


def test_a_few_long_rows_follow_many_short_ones(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage takes, and is judged by, rows of its own length; the first one's are the same."""
    passes: list[tuple[int, int, tuple[tuple[int, ...], ...]]] = []
    packed = heal_module.PackedBatch.of

    def watched(rows: Any, length: int, padding: int) -> Any:
        longest = max(len(piece) for row in rows for piece in row)
        passes.append((length, longest, tuple(tuple(piece) for row in rows for piece in row)))
        return packed(rows, length, padding)

    monkeypatch.setattr(heal_module.PackedBatch, "of", watched)
    alone = heal(options(base, sparse_steps=0, output=base / "alone"))
    first, passes[:] = list(passes), []
    mixed = heal(options(base, sparse_length=40, output=base / "mixed"))
    lengths = [length for length, _, _ in passes]
    assert lengths == sorted(lengths)
    assert set(lengths) == {24, 40}
    assert max(longest for length, longest, _ in passes if length == 40) == 40
    assert [piece for piece in passes if piece[0] == 24] == first
    assert mixed.evaluations[: len(alone.evaluations)] == alone.evaluations
    assert mixed.adapter.record["lengths"] == {"dense": 24, "sparse": 40}
    short = heal(options(base, sparse_length=24, output=base / "short"))
    repeat = heal(options(base, output=base / "same"))
    assert short.evaluations == repeat.evaluations
    for name, tensor in short.adapter.tensors().items():
        assert torch.equal(tensor, repeat.adapter.tensors()[name])


def without_time(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not name.startswith("seconds")}


def test_the_best_of_some_learning_rates_is_taken(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is that of the best rate from its first step on, also when it goes on later."""
    monkeypatch.setattr(heal_module, "RATES", (1e30, 1e-7, 2e-2))
    searched = interrupted(options(base, lr=None), after=2)
    fixed = heal(options(base, lr=2e-2, output=base / "given"))
    for name, tensor in fixed.adapter.tensors().items():
        assert torch.equal(searched.adapter.tensors()[name], tensor)
    assert searched.adapter.record["options"]["lr"] == 2e-2
    text = io.StringIO()
    heal(options(base, lr=None, output=base / "told"), Console(file=text, width=200))
    told = [line.split(":")[0] for line in text.getvalue().splitlines() if "12 steps" in line]
    assert told == [f"learning rate {rate}, 12 steps" for rate in ("1e+30", "1e-07", "0.02")]
    assert "taking a learning rate of 0.02" in text.getvalue()
    monkeypatch.setattr(heal_module, "RATES", (1e30,))
    with pytest.raises(TrainingError, match="not finite any more"):
        heal(options(base, lr=None, output=base / "none"))


def test_from_disk_it_ends_the_same(base: Path) -> None:
    heal(options(base))
    heal(options(base, output=base / "disk", from_disk=True))
    expected = load_file(base / "adapter" / "indexers.safetensors")
    for name, tensor in load_file(base / "disk" / "indexers.safetensors").items():
        assert torch.equal(tensor, expected[name])


def test_an_fp8_checkpoint_is_healed_and_left_alone(base: Path) -> None:
    quantise(base / "base")
    before = {path.name: path.read_bytes() for path in (base / "base").iterdir()}
    result = heal(options(base, dtype="bfloat16"))
    assert {path.name: path.read_bytes() for path in (base / "base").iterdir()} == before
    result.adapter.check(base / "base")
    kinds = {name: tensor.dtype for name, tensor in result.adapter.tensors().items()}
    assert len(kinds) == 2 * 5  # two F layers: wq_b, wk, k_norm's two, weights_proj
    for name, kind in kinds.items():
        quantised = name.endswith(("wq_b.weight", "wk.weight"))
        assert kind == (torch.bfloat16 if quantised else torch.float32)


def test_it_ends_with_its_best_weights(base: Path) -> None:
    settings = options(base, lr=30.0, dense_steps=6, sparse_steps=0, evaluate_every=1, clip=1e9)
    result = heal(settings)
    losses = [e.held_out_loss for e in result.evaluations]
    assert losses[-1] > min(losses)
    start = torch.load(base / "adapter.run" / "state.pt", weights_only=True)
    for name, tensor in result.adapter.tensors().items():
        assert torch.equal(tensor, start["best"][name])


def test_rows_hold_several_documents_and_conversations(base: Path) -> None:
    chats = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "a"}]}
        for n in range(40)
    ]
    texts = [{"text": "one two three four five six seven eight nine ten " * 3} for _ in range(3)]
    texts += [{"text": f"{n} is a number and so is everything after it"} for n in range(40)]
    path = base / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in chats + texts))
    assert heal(options(base, data=(str(path),), length=40)).evaluations[-1].held_out_loss > 0


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"length": 6}, TrainingError, "no longer than index_topk"),
        ({"sparse_length": 6}, TrainingError, "rows of 6 tokens are no longer than index_topk"),
        ({"pattern": "FSS"}, IndexCacheError, "3"),
        ({"data": ("nowhere",)}, IndexCacheError, "there is no data at nowhere"),
        ({"data": ("short.txt",)}, TrainingError, "0 to hold out .*split a long text"),
        ({"data": ("small.jsonl",)}, TrainingError, "more tokens than index_topk"),
        ({"checkpoint": Path("nowhere")}, CheckpointError, "is no folder of this machine"),
        ({"checkpoint": Path("dense")}, CheckpointError, "without a lightning indexer"),
        ({"checkpoint": Path("shared")}, PatternError, "indexer"),
        ({"checkpoint": Path("other")}, CheckpointError, "not trained here"),
        ({"output": Path("full")}, TrainingError, "holds something else"),
    ],
)
def test_what_is_refused_before_weights_are_read(
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    error: type[Exception],
    says: str,
) -> None:
    monkeypatch.chdir(base)
    monkeypatch.setattr("sglang_indexcache.lab.heal.heal.FrozenBody", None)
    Path("short.txt").write_text("a few words")
    Path("small.jsonl").write_text("".join(f'"{n} {n + 1}"\n' for n in range(99)))
    config = json.loads((base / "base" / "config.json").read_text())
    dense = {field: value for field, value in config.items() if not field.startswith("index")}
    for name, fields in (
        ("dense", dense | {"architectures": ["LlamaForCausalLM"]}),
        ("shared", config | {"indexer_types": ["full", "shared", "shared", "shared"]}),
        ("other", config | {"architectures": ["HYV4ForCausalLM"]}),
    ):
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(fields))
    Path("full").mkdir()
    Path("full", "thesis.txt").write_text("mine")
    with pytest.raises(error, match=says):
        heal(options(base, **changes))
    assert Path("full", "thesis.txt").exists()


def test_the_folder_of_another_run(base: Path) -> None:
    heal(options(base))
    with pytest.raises(TrainingError, match=r"lr .0.005 then, 0.1 now."):
        heal(options(base, lr=0.1))
    before = checkpoint_digest(base / "base")
    quantise(base / "base")
    assert checkpoint_digest(base / "base") != before
    with pytest.raises(TrainingError, match="digest of the checkpoint's files"):
        heal(options(base))


def test_other_data_under_the_same_name_is_another_run(base: Path) -> None:
    """It went on, with rows held out that it had trained on, and its record named the new data."""
    path = base / "texts.jsonl"

    def write(name: str) -> None:
        path.write_text("".join(json.dumps(f"{name} {n} " * 20) + "\n" for n in range(99)))

    def stop(*_: Any) -> None:
        raise StoppedError

    write("first")
    settings = options(base, data=(str(path),))
    with pytest.raises(StoppedError):
        heal(settings, on_step=stop)
    write("second")
    with pytest.raises(TrainingError, match=r"different: digest of the data .*another --output"):
        heal(settings)


def test_a_checkpoint_that_changes_meanwhile_is_told(base: Path) -> None:
    """The adapter once named the new files, on which it was not trained."""

    def replace(step: int, _: Any) -> None:
        if step == 2:
            quantise(base / "base")

    with pytest.raises(TrainingError, match="are others than when this run began"):
        heal(options(base), on_step=replace)
    assert not (base / "adapter").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"dense_steps": 0, "sparse_steps": 0},
        {"dtype": "int8"},
        {"rows": 0},
        {"lr": 0.0},  # once a trial chose another
        {"lr": float("nan")},
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(TrainingError):
        options(tmp_path, **changes)
