"""The plan of a deployment before it is rented; how it is composed is ``benchmarks``'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_indexcache.errors import BenchError, CheckpointError, LibraryError, PatternError
from sglang_indexcache.lab.latency.forecast import (
    MODELS,
    NO_RATE,
    Composed,
    Cost,
    choose_patterns,
    find_composed,
    find_model,
    plan_grid,
    plan_to_json,
)
from sglang_indexcache.library.sizes import SHAPES, checkpoint_of
from sglang_indexcache.pattern import Pattern

FEW = Pattern("FSSS")
COSTS: dict[str, list[Cost | None]] = {
    "prefill": [(100.0, 10.0, 0.01), (300.0, 50.0, 0.01), None],
    "row split": [(70.0, 4.0, 0.02), (200.0, 20.0, 0.01), None],
    "decode": [(10.0, 1.0, 0.0), (12.0, 2.0, 0.02), (16.0, 3.0, 0.04)],
}
MADE_UP = Composed("m", "h200", 1, 4, "title", (1000, 2000, 3000), COSTS, ())


@pytest.mark.parametrize(
    ("part", "context", "expected"),
    [
        ("prefill", 1000, (100.0, 100 / 70, 0.01)),
        ("row split", 1000, (100.0, 100 / 58, 0.02)),
        ("decode", 2500, (14.0, 14 / 6.5, 0.03)),
    ],
)
def test_a_pattern_saves_the_indexers_of_its_s_layers(
    part: Any, context: int, expected: tuple[float, ...]
) -> None:
    gain = MADE_UP.gain(part, FEW, context)
    assert gain is not None
    assert (gain.milliseconds, gain.gain, gain.off) == pytest.approx(expected)


@pytest.mark.parametrize("context", [999, 2001, 3000, 3001])
def test_nothing_is_said_beyond_the_rows(context: int) -> None:
    assert MADE_UP.gain("prefill", FEW, context) is None


def test_what_the_reader_is_told() -> None:
    deployment = find_composed("zai-org/glm-5-fp8", "H200", 8, 1)
    patterns, _ = choose_patterns(["1/2", "quarter=1/4"], "glm-5")
    grid = plan_grid(deployment, patterns, [32_768, 300_000])
    assert "composed" in grid.title
    assert [row[0] for row in grid.rows] == [
        *("Prefill of one prompt a rank", "every indexer, s"),
        *("1/2 (40 of 78 F)", "quarter (22 of 78 F)"),  # the library's
        *("every indexer, row split", "1/2, row split", "quarter, row split"),
        *("Decode, one request a rank", "every indexer, ms a step"),
        *("1/2 (40 of 78 F)", "quarter (22 of 78 F)"),
    ]
    assert {row[2] for row in grid.rows if row[1:]} == {NO_RATE}
    sources = " ".join(deployment.sources)
    assert "NVIDIA's rows of SGLang 0.5.14 on H200" in sources
    assert "every rank still makes all index queries" in sources


def test_a_replica_of_one_rank_has_no_rows_to_split() -> None:
    grid = plan_grid(
        find_composed("GLM-5-FP8", "b200", 8, 8), [("full", Pattern.full(78))], [32_768]
    )
    assert not any("row split" in row[0] for row in grid.rows)


def test_a_ratio_without_a_pattern_is_evenly_spaced_and_said_so() -> None:
    [(name, pattern)], [note] = choose_patterns(["1/4"], "deepseek-v3.2")
    assert (name, str(pattern)) == ("1/4", str(Pattern.uniform(61, 4)))
    assert "No 1/4 pattern of deepseek-v3.2 is known" in note
    with pytest.raises(LibraryError):
        choose_patterns(["glm-6-1of4"], "glm-5")
    with pytest.raises(PatternError, match="two patterns are called a, so that results"):
        choose_patterns(["a=1/2", "a=1/4"], "glm-5")


def test_programs_are_told_the_same() -> None:
    rows = plan_to_json(MADE_UP, [("few", FEW)], [1000])["gains"]
    parts = ("prefill", "row split", "decode")
    asked = [(part, name) for part in parts for name in ("every indexer", "few")]
    assert [(row["metric"], row["name"]) for row in rows] == asked
    assert (rows[-1]["speedup"], rows[-1]["every_indexer_ms"]) == (pytest.approx(10 / 7), 10.0)
    assert (rows[-1]["full_layers"], rows[0]["speedup"]) == (1, 1.0)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("glm-5-fp8", "a100", 8, 1), "no rates are known for 'a100'"),
        (
            ("glm-5-fp8", "H100", 8, 1),
            "do not fit: GLM-5-FP8 takes 94 GB of each of 8 GPUs, and H100",
        ),
        (
            ("glm-5-fp8", "h200", 8, 3),
            r"as --dp 3 splits them over 8 GPUs\. Take one of --dp 1, 2, 4",
        ),
        (("glm-5-fp8", "h200", 16, 1), "were composed for 8 GPUs, not for 16"),
        (("30b", "h200", 8, 1), r"measured layers of 30b\. There are rows of GLM-5-FP8, GLM-5"),
    ],
)
def test_deployments_that_cannot_be(asked: tuple[str, str, int, int], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        find_composed(*asked)


def test_models_by_name() -> None:
    assert find_model("zai-org/glm-5-fp8") == "GLM-5-FP8"
    with pytest.raises(BenchError, match="nobody has published measured layers of models/glm"):
        find_model("models/glm")
    for name in ("zai-org/GLM-5.2-FP8", "glm-5.2"):
        with pytest.raises(BenchError, match="shares already, as it was trained to, so no pattern"):
            find_model(name)
    with pytest.raises(BenchError, match="there is no folder /nowhere/GLM-5-FP8 here"):
        find_model("/nowhere/GLM-5-FP8")


FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("shape", "fields", "name"),
    [
        ("glm-5", {"quantization_config": FP8_BLOCKS}, "GLM-5-FP8"),
        ("glm-5", {}, "GLM-5"),
        ("deepseek-v3.2", {"quantization_config": FP8_BLOCKS}, "DeepSeek-V3.2"),
        ("glm-5", {"index_topk_freq": 4, "index_skip_topk_offset": 3}, "shares already"),
        ("glm-5", {"n_routed_experts": 168}, "nobody has published measured layers"),
        ("30b", {}, "nobody has published measured layers"),
        ("glm-5", {"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantised: awq 4"),
    ],
)
def test_a_folder_is_known_by_its_config(
    tmp_path: Path, shape: str, fields: dict[str, object], name: str
) -> None:
    architecture = checkpoint_of(shape).architecture
    config = {**SHAPES[shape], "architectures": [architecture], **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if name in MODELS:
        assert find_model(str(tmp_path)) == name
    else:
        with pytest.raises((BenchError, CheckpointError), match=name):
            find_model(str(tmp_path))
