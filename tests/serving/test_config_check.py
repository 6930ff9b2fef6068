"""Checks of what SGLang takes for granted in a config: told before it starts, and all of it."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from sglang_indexcache.errors import CheckpointError, CombinedError
from sglang_indexcache.models import BY_NAME, Family
from sglang_indexcache.serving.config_check import check_config
from sglang_indexcache.serving.engine_version import EngineSource
from tests.fixtures.models import small_config

pytest.importorskip("sglang")

FAMILIES = list(BY_NAME.values())
READERS = ("models/deepseek_v2.py", "models/deepseek_common/deepseek_weight_loader.py")
SGLANG = Path(str(EngineSource.installed().root))
ASKED_FIRST = {"quantization_config", "rope_theta", "num_nextn_predict_layers"}
"""Read only after hasattr, or for a draft model."""


def saved_by_transformers(family: Family, folder: Path, **fields: Any) -> dict[str, Any]:
    config = AutoConfig.for_model(family.model_type, **small_config(family, "tiny", 512, fields))
    config.save_pretrained(folder)
    return dict(json.loads((folder / "config.json").read_text()))


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Family, dict[str, Any]]:
    return request.param, saved_by_transformers(request.param, tmp_path)


def test_a_fresh_config_lacks_lines_that_are_named(fresh: tuple[Family, dict[str, Any]]) -> None:
    family, config = fresh
    with pytest.raises(CheckpointError, match="the config of m") as error:
        check_config(config, "m")
    lines, override = str(error.value).split("; or start with --json-model-override-args ")
    fields = json.loads("{" + lines.partition("config.json: ")[2] + "}")
    assert json.loads(override.strip("'.")) == fields == family.extra_config
    check_config({**config, **fields}, "m")


def test_no_field_that_sglang_reads_is_forgotten(
    fresh: tuple[Family, dict[str, Any]], tmp_path: Path
) -> None:
    """Every ``config.field`` in SGLang's code of these models, in what it makes of the file."""
    from sglang.srt.utils.hf_transformers.config import get_config

    family, _ = fresh
    names = {name for reader in READERS for name in fields_of(SGLANG / "srt" / reader)}
    assert {"moe_layer_freq", "kv_lora_rank", "topk_group"} <= names
    config = get_config(str(tmp_path), trust_remote_code=False)
    lacking = {name for name in names - ASKED_FIRST if not hasattr(config, name)}
    assert lacking == family.extra_config.keys() - {"indexer_rope_interleave"}


def fields_of(path: Path) -> set[str]:
    """Return what is read of ``config`` and ``self.config`` without a default."""
    return {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) in ("config", "hf_config", "self.config")
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"index_head_dim": 192}, "index_head_dim is 192 and must be 128"),
        ({"index_head_dim": 32}, "index_head_dim is 32 and must be 128.*; qk_rope_head_dim is 64"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu' and must be silu"),
        ({"n_group": 3}, "n_group is 3 and must divide n_routed_experts"),
        ({"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4}, "mlp_layer_types must be what first"),
    ],
)
def test_a_value_that_sglang_cannot_serve(
    fresh: tuple[Family, dict[str, Any]], fields: dict[str, Any], message: str
) -> None:
    family, config = fresh
    with pytest.raises(CheckpointError, match=f"SGLang cannot serve m: {message}"):
        check_config({**config, **family.extra_config, **fields}, "m")


def test_missing_fields_hide_no_limit(fresh: tuple[Family, dict[str, Any]]) -> None:
    family, config = fresh
    config = {name: config[name] for name in config if name not in family.extra_config}
    with pytest.raises(CombinedError) as error:
        check_config({**config, "hidden_act": "gelu"}, "m")
    absent, limit = map(str, error.value.each)
    assert "Add to its config.json" in absent
    assert "hidden_act is 'gelu' and must be silu" in limit


def test_the_cpu_platform_takes_index_keys_as_wide_as_their_rotated_part_or_wider(
    fresh: tuple[Family, dict[str, Any]],
) -> None:
    family, config = fresh
    config |= {**family.extra_config, "qk_rope_head_dim": 192}
    check_config(config | {"index_head_dim": 192}, "m", on_cpu=True)
    with pytest.raises(CheckpointError, match="qk_rope_head_dim is 192 and must be at most index"):
        check_config(config | {"index_head_dim": 128}, "m", on_cpu=True)


def test_what_a_config_class_fills_in_is_not_missed() -> None:
    """A published config.json leaves defaults out; only SGLang's reading of it has them all."""
    family = BY_NAME["glm-5"]
    check_config({"architectures": [family.architecture], **family.extra_config}, "m")
