"""What is read from a model's config, for every DSA architecture that SGLang 0.5.23 knows."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import CheckpointError
from sglang_indexcache.pattern import Pattern


def config(architecture: str = "GlmMoeDsaForCausalLM", **fields: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "num_hidden_layers": 6,
        "index_topk": 64,
        "hidden_size": 256,
        **fields,
    }


@pytest.mark.parametrize(
    "architecture",
    [
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "GlmMoeDsaForCausalLM",
        "HYV4ForCausalLM",
    ],
)
def test_plain_architectures(architecture: str) -> None:
    checkpoint = Checkpoint.from_config(config(architecture))
    assert checkpoint.architecture == architecture
    assert checkpoint.layer_ids == tuple(range(6))
    assert checkpoint.own == Pattern.full(6)
    assert not checkpoint.shares_already
    assert checkpoint.shape["hidden_size"] == 256


def test_dict_and_object_read_alike() -> None:
    fields = config(index_topk_pattern="FSSFSS")
    assert Checkpoint.from_config(fields) == Checkpoint.from_config(SimpleNamespace(**fields))


def test_multimodal_config_is_read_from_its_text_part() -> None:
    text = config(layer_types=["indexed_attention"] * 6)
    outer = {"architectures": ["Glm5NextForConditionalGeneration"], "text_config": text}
    assert Checkpoint.from_config(outer).num_layers == 6


def test_longcat_has_two_attentions_per_block() -> None:
    fields = config("LongcatFlashForCausalLM", num_layers=3, cli_factor=2)
    checkpoint = Checkpoint.from_config(fields)
    assert checkpoint.num_layers == 6
    assert str(checkpoint.own) == "FSFSFS"


def test_glm5_next_counts_only_its_attention_layers() -> None:
    types = ["linear_attention"] * 3 + ["indexed_attention"]
    fields = config("Glm5NextForConditionalGeneration", num_hidden_layers=8, layer_types=types * 2)
    checkpoint = Checkpoint.from_config(fields)
    assert checkpoint.layer_ids == (3, 7)
    assert checkpoint.own == Pattern("FF")
    fields["indexer_types"] = ["full"] * 7 + ["shared"]
    assert Checkpoint.from_config(fields).own == Pattern("FS")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"indexer_types": ["full", "shared"] * 3}, "FSFSFS"),
        ({"index_topk_pattern": "FSSFSS"}, "FSSFSS"),
        ({"index_topk_freq": 4}, "FFSSSF"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, "FFFSSS"),
        ({"index_topk_freq": None, "indexer_types": None}, "FFFFFF"),
        # SGLang's priority: indexer_types, then the pattern, then the frequency.
        ({"indexer_types": ["full"] * 6, "index_topk_pattern": "FSSFSS"}, "FFFFFF"),
        ({"index_topk_pattern": "FSSFSS", "index_topk_freq": 2}, "FSSFSS"),
    ],
)
def test_own_sharing(fields: dict[str, Any], expected: str) -> None:
    assert str(Checkpoint.from_config(config(**fields)).own) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 6},
            "LlamaForCausalLM without a lightning indexer.* Give the folder of such a model",
        ),
        (config("DeepseekV4ForCausalLM"), "blocks of a compressed context"),
        ({"num_hidden_layers": 3}, "names no architecture"),
        (config(num_hidden_layers=None), "the config of the model has no num_hidden_layers"),
        (
            config("LongcatFlashForCausalLM", num_hidden_layers=None),
            "the config of the model has no num_hidden_layers",
        ),
        (config(index_topk_pattern="FSS"), "malformed: the pattern has 3 characters"),
        (config(index_topk_pattern="fss"), "malformed: the pattern contains"),
        (config(indexer_types=["full"]), "has 1 entries, the model needs 6"),
        (config(indexer_types=["full", "odd"] * 3), "may hold 'full' and 'shared' only"),
    ],
)
def test_unusable_models_are_one_clear_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.from_config(fields, "the model")
