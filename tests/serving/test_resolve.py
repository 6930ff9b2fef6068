"""Flags, environment and config come to one plan or to one clear error."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import Findings, IndexCacheError, PatternError, SettingsError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.options import Choices, collect
from sglang_indexcache.serving.plan import CONFIG_KEY, Plan, Route
from sglang_indexcache.serving.resolve import BLINDLY, make_plan, read_overrides
from tests.fakes.glm5 import CONFIG as GLM5


def checkpoint(letters: str = "FFFFFF", architecture: str = "GlmMoeDsaForCausalLM") -> Checkpoint:
    return Checkpoint(architecture, tuple(range(len(letters))), Pattern(letters), {})


def flags(**values: str | None) -> Choices:
    return collect({f"indexcache_{name}": value for name, value in values.items()})


def plan(
    request: Choices | None = None, letters: str = "FFFFFF", overrides: dict[str, Any] | None = None
) -> Plan:
    findings = Findings()
    result = make_plan(request or flags(), checkpoint(letters), overrides or {}, "", findings)
    findings.report()
    return result


def test_flag() -> None:
    result = plan(flags(pattern="FSSFSS"))
    assert str(result.pattern) == "FSSFSS"
    assert result.source == "--indexcache-pattern FSSFSS (given literally)"
    assert result.mode == "static"
    assert "2 of 6 layers keep their indexer" in result.describe()
    assert "4 reuse" in result.describe()


def test_the_start_line_says_what_is_known_of_the_patterns_quality() -> None:
    assert (
        plan(flags(pattern="FSSFSS"))
        .describe()
        .endswith("long-context quality: not evaluated on this checkpoint")
    )
    assert "quality" not in plan().describe()  # nothing is shared, so nothing can be lost


def test_a_variable_that_nobody_reads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_INDEXCACHE_LIBRARY", "")
    flags()
    monkeypatch.setenv("SGLANG_INDEXCACHE_PATERN", "1/4")
    with pytest.raises(SettingsError, match=r"_PATERN is set.*take one of SGLANG_"):
        flags()


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_INDEXCACHE_PATTERN", "uniform:1/2")
    monkeypatch.setenv("SGLANG_INDEXCACHE_MODE", "live")
    result = plan()
    assert str(result.pattern) == "FSFSFS"
    assert result.mode == "live"
    assert "SGLANG_INDEXCACHE_PATTERN" in result.source


def test_flag_and_environment_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_INDEXCACHE_PATTERN", "FSSFSS")
    assert str(plan(flags(pattern="FSSFSS")).pattern) == "FSSFSS"
    with pytest.raises(SettingsError, match="is 'FSFSFS' and SGLANG_INDEXCACHE_PATTERN is"):
        flags(pattern="FSFSFS")


def test_kernels_are_sglangs_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan().kernels == "engine"
    assert plan(flags(kernels="cuda")).kernels == "cuda"
    monkeypatch.setenv("SGLANG_INDEXCACHE_KERNELS", "cuda")
    assert plan().kernels == "cuda"
    monkeypatch.setenv("SGLANG_INDEXCACHE_KERNELS", "fastest")
    message = (
        "SGLANG_INDEXCACHE_KERNELS: 'fastest' is not auto, or one of cuda, reference, .*; or engine"
    )
    with pytest.raises(SettingsError, match=message):
        flags()


@pytest.mark.parametrize(
    "overrides",
    [
        {"index_topk_pattern": "FSSFSS"},
        {"index_topk_freq": 3, "index_skip_topk_offset": 1},
        {"indexer_types": ["full", "shared", "shared"] * 2},
        {"text_config": {"index_topk_pattern": "FSSFSS"}},
    ],
)
def test_upstreams_own_way(overrides: dict[str, Any]) -> None:
    result = plan(overrides=overrides)
    assert str(result.pattern) == "FSSFSS"
    assert "--json-model-override-args" in result.source
    assert str(plan(flags(pattern="FSSFSS"), overrides=overrides).pattern) == "FSSFSS"
    with pytest.raises(SettingsError, match="gives FFSFSS and --json-model-override-args"):
        plan(flags(pattern="FFSFSS"), overrides=overrides)


def test_upstreams_freq_is_upstreams_schedule() -> None:
    assert str(plan(overrides={"index_topk_freq": 4}).pattern) == "FFSSSF"


@pytest.mark.parametrize(("pattern", "message"), [("FSSFS", "1 too short"), ("1/4", "uniform:1/4")])
def test_bad_flag(pattern: str, message: str) -> None:
    """All that can be wrong with a name is in ``tests/library/test_resolve.py``."""
    with pytest.raises(IndexCacheError, match=message) as caught:
        plan(flags(pattern=pattern))
    assert "--indexcache-pattern" in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"index_topk_pattern": "FSS"}, "3 too short"),
        ({"index_topk_pattern": "SFFFFF"}, "starts with S"),
        ({"index_topk_freq": 0}, "index_topk_freq must be at least 1"),
        ({"index_skip_topk_offset": 3}, "Give index_topk_freq too"),
        ({"index_topk_freq": 2, "index_topk_pattern": "FSSFSS"}, "Give only one"),
    ],
)
def test_bad_override(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(IndexCacheError, match=message) as caught:
        plan(overrides=overrides)
    assert "--json-model-override-args" in str(caught.value)


def test_our_options_are_not_read_from_the_models_config() -> None:
    with pytest.raises(SettingsError, match="has indexcache_pattern, which nobody reads there"):
        read_overrides('{"indexcache_pattern": "1/4"}')


def test_default_is_the_checkpoints_own_sharing() -> None:
    result = plan(letters="FFSFSS")
    assert result.pattern == Pattern("FFSFSS")
    assert "trained with it" in result.source
    assert result.advice == ""


def test_default_without_sharing_warns_and_names_the_library() -> None:
    result = plan()
    assert result.pattern == Pattern.full(6)
    assert "every layer runs its indexer" in result.advice
    glm5 = Checkpoint.from_config(GLM5)
    advice = make_plan(flags(), glm5, {}, "", Findings()).advice
    assert "glm-5-1of2, glm-5-1of4" in advice


def test_asking_for_full_does_not_warn() -> None:
    assert plan(flags(pattern="full")).advice == ""


def test_pattern_may_not_need_missing_indexers() -> None:
    assert str(plan(flags(pattern="FSSFSS"), letters="FFSFSS").pattern) == "FSSFSS"
    with pytest.raises(PatternError, match="ships no indexer weights"):
        plan(flags(pattern="FFFFFF"), letters="FFSFSS")
    with pytest.raises(PatternError, match="ships no indexer weights"):
        plan(overrides={"index_topk_freq": 1}, letters="FFSFSS")


def test_static_plan_builds_the_pattern() -> None:
    overrides = plan(flags(pattern="FSSFSS")).hf_overrides()
    assert overrides["indexer_types"] == ["full", "shared", "shared"] * 2
    assert overrides["index_topk_pattern"] is None
    assert overrides["index_topk_freq"] is None
    assert overrides["index_skip_topk_offset"] is None


def test_live_plan_builds_every_indexer_the_checkpoint_has() -> None:
    overrides = plan(flags(pattern="FSSFSS", mode="live"), letters="FFSFSS").hf_overrides()
    assert overrides["indexer_types"] == ["full", "full", "shared", "full", "shared", "shared"]


def test_plan_travels_in_the_config() -> None:
    original = plan(flags(pattern="FSSFSS", mode="live", index_k_dtype="fp8_e4m3", kernels="cuda"))
    config = SimpleNamespace(**original.hf_overrides())
    assert Plan.from_hf_config(config) == original
    assert Plan.from_hf_config(SimpleNamespace()) is None


@pytest.mark.parametrize("text_config", [{}, {"text_config": {}}])
def test_routes_that_are_decided_later_travel_with_it(text_config: dict[str, Any]) -> None:
    original = plan(flags(pattern="FSSFSS", kernels="cuda:select"))
    config = SimpleNamespace(**text_config)
    before = original.config_overrides({"rope_theta": 5}, config)
    routes = (Route("select", "prefill", "cuda", "asked for"), Route("select", "decode", None, "x"))
    after = original.with_routes(routes, json.dumps(before))
    routed = replace(original, routes=routes)
    assert json.loads(after) == routed.config_overrides({"rope_theta": 5}, config)
    assert Plan.from_overrides(after) == routed
    assert [str(route) for route in routes] == [
        "select in prefill: cuda (asked for)",
        "select in decode: engine (x)",
    ]


def test_only_a_pattern_of_its_own_keeps_kv_apart() -> None:
    """Stock SGLang may have what it computes too, but not where requests of all patterns meet."""
    first, second = Pattern("FSSFSS"), Pattern("FSFSFS")
    static = plan(flags(pattern="FSSFSS"))
    apart = static.kv_namespace(first)
    assert apart is not None
    assert apart == plan(flags(pattern="FSSFSS"), letters="FFSFSS").kv_namespace(first)
    assert apart != static.kv_namespace(second)
    assert plan(letters="FSSFSS").kv_namespace(first) is None
    assert plan(flags(pattern="full")).kv_namespace(Pattern.full(6)) is None
    live = plan(flags(pattern="full", mode="live"))
    spaces = {live.kv_namespace(pattern) for pattern in (first, second, Pattern.full(6))} | {apart}
    assert len(spaces) == 4
    assert None not in spaces


def test_what_long_prompts_get_is_warned_of_and_has_its_quality_told() -> None:
    result = plan(flags(pattern="full < 1K <= uniform:1/3", mode="live"))
    assert result.advice == BLINDLY
    assert result.describe().endswith("long-context quality: not evaluated on this checkpoint")
    result = plan(flags(pattern="FSSSFS < 1K <= full", mode="live"))
    assert result.advice == result.quality == ""


def test_prompt_length_decides_in_live_mode() -> None:
    result = plan(flags(pattern="full < 1K <= FSSFSS", mode="live"))
    assert str(result.policy) == "FFFFFF < 1K <= FSSFSS"
    assert result.pattern == Pattern.full(6)
    assert Plan.from_json(result.hf_overrides()[CONFIG_KEY]) == result
    assert "FFFFFF < 1K <= FSSFSS" in result.terms
    assert "full < 1K <= FSSFSS" in result.source
    with pytest.raises(SettingsError, match=r"in live mode only\. Add --indexcache-mode live"):
        plan(flags(pattern="full < 1K <= FSSFSS"))
    with pytest.raises(SettingsError, match=r"--indexcache-pattern full < 1K: .* is no choice"):
        plan(flags(pattern="full < 1K", mode="live"))
    with pytest.raises(SettingsError, match="Give only one"):
        plan(flags(pattern="full < 1K <= FSSFSS", mode="live"), overrides={"index_topk_freq": 1})
