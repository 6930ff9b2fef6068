"""Reading of a model's config, for every DSA architecture that SGLang 0.5.23 knows."""

import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_indexcache.checkpoint import FORMS, MODELOPT_FILE, Checkpoint, fp8_blocks, read_config
from sglang_indexcache.errors import CheckpointError
from sglang_indexcache.models import FAMILIES
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
    ("keys", "own"),
    [
        ({"index_topk_pattern": "SSSFSSSS"}, "FS"),
        ({"index_topk_pattern": list("SSSFSSSS")}, "FS"),
        ({"index_topk_freq": 2}, "FF"),  # layers 3 and 7 are both F
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, "FS"),
    ],
)
def test_sglangs_own_keys_count_every_layer_of_a_hybrid(keys: dict[str, Any], own: str) -> None:
    """So does SGLang: ``dsa_layer_skips_topk(config, layer_id)``."""
    pytest.importorskip("sglang")
    from sglang.srt.configs.model_config import dsa_layer_skips_topk

    types = ["linear_attention"] * 3 + ["indexed_attention"]
    fields = config("Glm5NextForConditionalGeneration", num_hidden_layers=8, layer_types=types * 2)
    fields |= keys
    assert Checkpoint.from_config(fields).own == Pattern(own)
    engines = SimpleNamespace(**fields, cli_factor=1)
    assert [dsa_layer_skips_topk(engines, layer) for layer in (3, 7)] == [c == "S" for c in own]


def test_letters_for_the_indexers_of_a_hybrid_alone_are_no_pattern_of_sglangs() -> None:
    types = ["linear_attention"] * 3 + ["indexed_attention"]
    fields = config("Glm5NextForConditionalGeneration", num_hidden_layers=8, layer_types=types * 2)
    with pytest.raises(CheckpointError, match="has 2 letters, and SGLang counts every layer"):
        Checkpoint.from_config({**fields, "index_topk_pattern": "FS"})


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
        (config("DeepseekV4ForCausalLM"), "select compressed entries of several tokens"),
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


# -- values that no model has ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "must"),
    [
        ("num_hidden_layers", "7", "is '7' and must be a whole number from 1 to 4096"),
        ("qk_rope_head_dim", [], "is [] and must be a whole number"),
        ("qk_rope_head_dim", "", "is '' and must be a whole number"),
        ("qk_rope_head_dim", {}, "is {} and must be a whole number"),
        ("qk_rope_head_dim", "64", "is '64' and must be a whole number"),
        ("num_hidden_layers", 1e30, "a whole number"),
        ("num_hidden_layers", 10**10, "a whole number from 1 to 4096"),
        ("num_layers", True, "a whole number"),
        ("index_topk", "2048", "a whole number of at least 1"),
        ("index_topk_freq", "2", "a whole number"),
        ("index_skip_topk_offset", [1], "a whole number"),
        ("indexer_types", 0, "a list of words"),
        ("indexer_types", [None] * 6, "a list of words"),
        ("index_topk_pattern", 5, "a word, or a list of words"),
        ("architectures", 5, "a list of words"),
        ("cli_factor", 2.5, "a whole number"),
        ("linear_attn_config", {"kda_layers": 5}, "whose kda_layers are whole numbers"),
        ("layer_types", {}, "a list of words"),
        ("text_config", "x", "an object"),
        ("quantization_config", {"weight_block_size": 128}, "whose weight_block_size are whole"),
    ],
)
def test_a_field_of_another_type_is_named(name: str, value: Any, must: str) -> None:
    fields = {**config(), name: value}
    for form in (fields, SimpleNamespace(**fields)):
        with pytest.raises(CheckpointError) as error:
            Checkpoint.from_config(form, "the model")
        assert f"the config of the model is malformed: {name} is " in str(error.value)
        assert must in str(error.value)


def test_every_field_of_another_type_is_named() -> None:
    """The fields of the language model's part are named, too."""
    fields = config(index_topk=None, text_config=config(index_topk="x", hidden_size=[]))
    with pytest.raises(CheckpointError, match=r"text_config .*hidden_size is .*; index_topk is"):
        Checkpoint.from_config(fields)


def test_a_model_without_any_indexer_layer() -> None:
    fields = config("Glm5NextForConditionalGeneration", layer_types=["linear_attention"] * 6)
    with pytest.raises(CheckpointError, match="no layer of this model has an indexer"):
        Checkpoint.from_config(fields)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
"""What a file of JSON can hold; Python's reader takes NaN and the infinities too."""
LIKELY = st.sampled_from(
    (0, 1, 2, 7, 4096, 4097, "F", "FSSFSS", ["F"] * 6, ["full"] * 6, ["shared"] * 6, ["full"] * 99,
     {"kda_layers": list(range(9))}, {"index_topk": 4, "num_hidden_layers": 3})
)  # fmt: skip


@given(
    architecture=st.sampled_from(("Unknown", *(family.architecture for family in FAMILIES))),
    fields=st.dictionaries(st.sampled_from((*FORMS, "index_x")), JSON | LIKELY, max_size=4),
)
def test_any_config_is_read_or_refused(architecture: str, fields: dict[str, Any]) -> None:
    for form in (config(architecture) | fields, SimpleNamespace(**config(architecture) | fields)):
        with suppress(CheckpointError):
            checkpoint = Checkpoint.from_config(form)
            assert len(checkpoint.own) == checkpoint.num_layers > 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"null", "is not a model's config"),
        (b"[]", "is not a model's config"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 10**5, "is not JSON"),
        (b'{"num_layers": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b'{"architectures": 5}', "config.json is malformed: architectures is 5"),
    ],
)
def test_a_file_that_is_no_config(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path)


@given(content=st.binary(max_size=64))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with suppress(CheckpointError):
        read_config(tmp_path)


@pytest.mark.parametrize("part", ["quantization_config", "text_config", "compression_config"])
@pytest.mark.parametrize(
    ("quantised", "name"),
    [
        ({"quant_method": "awq", "bits": 4}, "is quantised: awq 4. Plain weights"),
        ({"quant_method": "gptq", "bits": 8, "desc_act": True}, "is quantised: gptq 8. Plain"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            "is quantised: modelopt NVFP4. Plain",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "is quantised: compressed-tensors pack-quantized. Plain",
        ),
        ({"quant_method": "fp8"}, "is quantised: fp8 without weight_block_size. Plain"),
        ({"bits": 4}, "is quantised: in an unknown way 4. Plain"),
    ],
)
def test_a_form_that_is_not_read_is_named(
    tmp_path: Path, part: str, quantised: dict[str, Any], name: str
) -> None:
    """Any was once counted, and read, as block FP8."""
    config = {part: quantised}
    if part == "text_config":
        config = {part: {"quantization_config": quantised}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=name):
        fp8_blocks(tmp_path)


@pytest.mark.parametrize("nothing", [{}, {"quantization_config": None}, {"text_config": {}}])
def test_plain_and_block_fp8_are_read(tmp_path: Path, nothing: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(nothing))
    assert fp8_blocks(tmp_path) is None
    (tmp_path / MODELOPT_FILE).write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(CheckpointError, match="is quantised: modelopt"):
        fp8_blocks(tmp_path)
    block = {"quant_method": "fp8", "weight_block_size": [64, 32], "fmt": "e4m3"}
    (tmp_path / "config.json").write_text(json.dumps({**nothing, "quantization_config": block}))
    assert fp8_blocks(tmp_path) == (64, 32)
