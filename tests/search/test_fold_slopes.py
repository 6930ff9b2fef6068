"""The slopes of a checkpoint, against products that transformers' own code makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.random_model import make_model
from sglang_indexcache.cli import app
from sglang_indexcache.hf import share
from sglang_indexcache.library import Resolved, Slopes
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search import fold_slopes
from sglang_indexcache.search.calibration import Score
from sglang_indexcache.search.setup import Setup
from sglang_indexcache.study.provenance import checkpoint_digest
from tests.oracle import load_eager

CONTEXT = 160


@pytest.fixture(scope="module", params=("glm-5", "deepseek-v3.2"))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param)
    fields = {"index_topk": 16}
    make_model(path, request.param, "tiny", vocab_size=512, dtype="float32", fields=fields)
    return path


@pytest.fixture(scope="module")
def calibrated(folder: Path) -> Slopes:
    steps: list[int] = []
    path, setup = folder / "some.slopes", set_up(folder)
    slopes = fold_slopes.calibrate(folder, setup, path, "float32", lambda: steps.append(1))
    assert len(steps) == 3 * 6
    return slopes


def set_up(folder: Path) -> Setup:
    return Setup.read(folder, "machine", context=CONTEXT, batches=2, held_out=1, score=Score.ALL)


def products(folder: Path, ids: tuple[int, ...]) -> list[tuple[np.ndarray, ...]]:
    """Return by layer products ``[S, H, T]``, weights ``[S, H]`` and exact scores ``[S, T]``."""
    model = load_eager(folder)
    inputs: list[Any] = []
    relu, topk = torch.nn.functional.relu, torch.Tensor.topk

    def before(x: torch.Tensor) -> torch.Tensor:
        inputs.append([x[0].double().numpy()])
        return relu(x)

    def after(x: torch.Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        if x.dim() == 3 and x.shape[-1] == len(ids):
            inputs[-1].append(x[0].double().numpy())
        return topk(x, k, *args, **kwargs)

    for name, module in model.named_modules():
        if name.endswith("indexer.weights_proj"):
            module.register_forward_hook(lambda *hooked: inputs[-1].append(hooked[2][0].numpy()))
    torch.nn.functional.relu, torch.Tensor.topk = before, after  # type: ignore
    try:
        with torch.no_grad():
            model(torch.tensor([ids]), use_cache=False)
    finally:
        torch.nn.functional.relu, torch.Tensor.topk = relu, topk  # type: ignore
    return [(x, weights, exact) for x, weights, exact in inputs]


def test_slopes_and_what_they_miss_are_those_of_brute_force(
    folder: Path, calibrated: Slopes
) -> None:
    """They are to the last digit in layer 0; other layers' inputs hang on how ties were broken."""
    setup = set_up(folder)
    *texts, held_out = [products(folder, ids) for ids in setup.calibration.sequences]
    for layer, layer_slopes in enumerate(calibrated.layers):
        assert layer_slopes is not None
        slack = 1 if layer == 0 else 100
        for head, slope in enumerate(layer_slopes.slopes):
            pairs = []
            for text in texts:
                for s, (x, _, exact) in enumerate(zip(*text[layer], strict=True)):
                    scores = exact[: s + 1]
                    best = np.argsort(-scores, kind="stable")[: 4 * 16]
                    pairs.append(x[head, best])
            x = np.concatenate(pairs)
            right = np.maximum(x, 0)
            expected = np.cov(x, right, bias=True)
            assert slope == pytest.approx(expected[0, 1] / expected[0, 0], abs=2e-5 * slack)
        x, weights, exact = held_out[layer]
        missed, picks = {1: 0, 2: 0, 4: 0}, 0
        for s in range(len(exact) // 2, len(exact)):
            top = set(np.argsort(-exact[s, : s + 1], kind="stable")[:16])
            order = np.argsort(
                -(weights[s] * layer_slopes.slopes) @ x[s, :, : s + 1], kind="stable"
            )
            picks += len(top)
            for factor in missed:
                missed[factor] += len(top - set(order[: 16 * factor]))
        for factor, count in missed.items():
            assert layer_slopes.missed[str(factor)] == pytest.approx(
                count / picks, abs=0.0004 * slack
            )


def test_the_file_is_bound_to_the_checkpoint(folder: Path, calibrated: Slopes) -> None:
    again = Slopes.read(calibrated.path)
    assert again == calibrated
    assert again.checkpoint == checkpoint_digest(folder)
    assert again.digest == calibrated.digest
    assert "Python standard library" in again.record["data"]


def test_a_layer_that_folds_badly_is_named_and_kept_exact(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fold_slopes, "BADLY", -1.0)
    path = tmp_path / "MODEL.slopes"
    arguments = ["--model", str(folder), "--context", str(CONTEXT), "-o", str(path)]
    arguments += ["--texts", "1", "--held-out", "1"]
    result = CliRunner().invoke(app, ["fold", "calibrate", *arguments])
    assert result.exit_code == 0, result.output
    assert "fold badly and stay exact: layers 0, 1, 2, 3, 4, 5" in result.output
    slopes = Slopes.read(path)
    assert slopes.digest in result.output
    assert [slopes.of(layer) for layer in range(6)] == [None] * 6
    assert len(json.loads(path.read_text())["layers"][0]["slopes"]) == 8


def test_patterns_that_fold_are_compared_by_their_slopes(
    folder: Path, calibrated: Slopes, tmp_path: Path
) -> None:
    folding = "".join("F" if slopes is None else "L" for slopes in calibrated.by_layer)
    patterns = ["full", f"{folding}@{calibrated.path}", f"mine=FSFSFS+c2@{calibrated.path}"]
    options = ["--context", str(CONTEXT), "--held-out", "2", "--score", "all", "-o", str(tmp_path)]
    command = ["search", "compare", *patterns, "--model", str(folder), *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    facts = json.loads((tmp_path / "compare.json").read_text())
    assert [each["name"] for each in facts["comparisons"]] == [
        f"{folding}@some",
        "mine",
    ]
    setup = Setup.read(folder, "machine", context=CONTEXT, batches=1, held_out=2, score=Score.ALL)
    data, model = setup.calibration.held_out_alone(), load_eager(folder)
    for each in facts["comparisons"]:
        losses = []
        for ids, counted in zip(data.sequences, data.counted, strict=True):
            resolved = Resolved(Pattern(each["pattern"]), "", slopes=calibrated)
            with share(model, resolved), torch.no_grad():
                logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
            targets = torch.tensor(ids[1:])
            nats = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
            losses.append(float(nats[torch.from_numpy(np.asarray(counted))].mean()))
        assert each["loss"] == pytest.approx(np.mean(losses), abs=1e-3)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    (tmp_path / "model.safetensors").write_bytes(b"another")
    command[command.index("--model") + 1] = str(tmp_path)
    refusal = CliRunner().invoke(app, command)
    assert refusal.exit_code == 1
    assert "is another checkpoint" in " ".join(refusal.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "out.json"], "must end in .slopes"),
        (["-o", "out.slopes", "--dtype", "int8"], "--dtype is float32 or bfloat16"),
        (["-o", "out.slopes", "--context", "16"], "cannot tell patterns apart"),
    ],
)
def test_what_cannot_be_done_is_said_first(
    folder: Path, arguments: list[str], message: str
) -> None:
    result = CliRunner().invoke(app, ["fold", "calibrate", "--model", str(folder), *arguments])
    assert result.exit_code == 1
    assert message in result.output
