"""``share`` under patterns that fold, against transformers' own code with a line for its ReLU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.random_model import make_model
from sglang_indexcache import share
from sglang_indexcache.errors import CheckpointError, LibraryError, PatternError
from sglang_indexcache.library import LIBRARY_VARIABLE, Slopes
from sglang_indexcache.pattern import Pattern
from tests.oracle import Oracle, generated, load_eager
from tests.slopes import random_slopes

LENGTH = 150
"""Tokens. Lists hold 64, so candidates of factor 2 leave something out too."""
FORMS = ("LLLLLL", "FLLLFL", "LSSLSS", "FFFFFF+c2", "FSLFSS+c2")


@pytest.fixture(scope="module", params=("glm-5", "deepseek-v3.2"))
def folder(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Path:
    return checkpoints[request.param]


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_eager(folder)


@pytest.fixture(scope="module")
def slopes(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Slopes:
    return random_slopes(folder, tmp_path_factory.mktemp("slopes") / "some.slopes")


@pytest.fixture(scope="module")
def oracle(folder: Path, slopes: Slopes) -> Oracle:
    model = Oracle(folder, torch.float32, first_of_ties=False)
    model.slopes = list(slopes.by_layer)
    return model


def decided(oracle: Oracle, text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens ``[1, T]`` of which no selection hangs on rounding, and the oracle's answer."""
    for seed in range(60):
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randint(10, 512, (1, LENGTH), generator=draw)
        answer = oracle.answer(ids[0].tolist(), Pattern(text))
        if answer.margin > 1e-6:
            return ids, answer.logprobs
    raise AssertionError("every text has a near-tie")


def token_logprobs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logprobs = model(ids, use_cache=False).logits[0].log_softmax(-1)[:-1]
    return logprobs.gather(1, ids[0, 1:, None]).squeeze(1)


@pytest.mark.parametrize("text", FORMS)
def test_a_prefill_is_the_oracles(model: Any, slopes: Slopes, oracle: Oracle, text: str) -> None:
    ids, expected = decided(oracle, text)
    exact = token_logprobs(model, ids)
    with share(model, f"{text}@{slopes.path}") as sharing:
        logprobs = token_logprobs(model, ids)
    assert str(sharing.pattern) == f"{text}@{slopes.digest}"
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(logprobs, exact, atol=1e-3)
    sees_all = (128 if text == "FFFFFF+c2" else 64) - 1
    torch.testing.assert_close(logprobs[:sees_all], exact[:sees_all], rtol=0, atol=1e-5)
    assert torch.equal(token_logprobs(model, ids), exact)  # afterwards the model is as it was


def test_greedy_generation_with_a_cache_is_the_oracles(
    model: Any, slopes: Slopes, oracle: Oracle
) -> None:
    for text in ("LLLLLL", "FSLFSS+c2"):
        ids, _ = decided(oracle, text)
        expected, gap = oracle.greedy(ids[0].tolist(), 6, Pattern(text))
        assert gap > 1e-7
        with share(model, f"{text}@{slopes.path}"):
            tokens = generated(model, ids, 6)
        assert tokens[0, LENGTH:].tolist() == expected


def test_a_layer_without_slopes_stays_exact(
    model: Any, folder: Path, tmp_path: Path, oracle: Oracle
) -> None:
    """Folded alone, in an F layer; an L layer is refused."""
    partly = random_slopes(folder, tmp_path / "some.slopes", exact=range(1, 6))
    assert partly.digest != random_slopes(folder, tmp_path / "all.slopes").digest
    ids, expected = decided(oracle, "LFFFFF")
    with share(model, f"LFFFFF@{partly.path}"):
        torch.testing.assert_close(token_logprobs(model, ids), expected, rtol=0, atol=1e-5)
    none = random_slopes(folder, tmp_path / "none.slopes", exact=range(6))
    exact = token_logprobs(model, ids)
    with share(model, f"FFFFFF+c2@{none.path}"):
        assert torch.equal(token_logprobs(model, ids), exact)
    with (
        pytest.raises(PatternError, match=r"layer 1 folds badly .* Make it F"),
        share(model, f"FLFFFF@{partly.path}"),
    ):
        raise AssertionError("it was refused")


def test_an_inner_pattern_is_in_effect_alone(model: Any, slopes: Slopes, oracle: Oracle) -> None:
    ids, plain = decided(oracle, "FSSSSS")
    with share(model, f"LLLLLL@{slopes.path}"), share(model, "FSSSSS"):
        torch.testing.assert_close(token_logprobs(model, ids), plain, rtol=0, atol=1e-5)


def test_a_pattern_is_known_by_the_digest_in_the_librarys_folders(
    model: Any, slopes: Slopes, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = Pattern(f"LLLLLL@{slopes.digest}")
    with pytest.raises(LibraryError, match=r"no file in .* holds them"), share(model, pattern):
        raise AssertionError("it was refused")
    monkeypatch.setenv(LIBRARY_VARIABLE, str(slopes.path.parent))
    with share(model, pattern) as sharing:
        assert sharing.pattern == pattern


def test_slopes_of_other_weights_are_refused(model: Any, tmp_path: Path) -> None:
    make_model(tmp_path, "glm-5", "tiny", vocab_size=512, seed=9)
    strangers = random_slopes(tmp_path, tmp_path / "others.slopes")
    with (
        pytest.raises(CheckpointError, match=r"is another (checkpoint|model)"),
        share(model, f"LLLLLL@{strangers.path}"),
    ):
        raise AssertionError("it was refused")


def test_without_slopes_nothing_folds(model: Any) -> None:
    for text in ("LLLLLL", "full+c4", "folded:1/2"):
        with pytest.raises(PatternError, match="by which slopes"), share(model, text):
            raise AssertionError("it was refused")


def test_slopes_are_compared_with_the_models_folder(
    model: Any, slopes: Slopes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.config, "_name_or_path", "some-one/some-model")
    with pytest.raises(CheckpointError, match="needs a model out of a folder"):
        share(model, f"LLLLLL@{slopes.path}").__enter__()
