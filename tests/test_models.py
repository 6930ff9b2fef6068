"""The table of model families: what a row promises holds for every row."""

import re

import pytest

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import CheckpointError
from sglang_indexcache.library.sizes import SHAPES
from sglang_indexcache.models import (
    BY_ARCHITECTURE,
    BY_NAME,
    FAMILIES,
    SHAPE_FIELDS,
    TRAINABLE,
    Family,
)
from tests.fixtures.models import SIZES, small_config

each_trainable = pytest.mark.parametrize("family", TRAINABLE.values(), ids=list(BY_NAME))


def test_no_two_rows_share_a_key() -> None:
    assert len(BY_ARCHITECTURE) == len(FAMILIES)
    assert len(BY_NAME) == len(TRAINABLE) == sum(bool(f.model_type) for f in FAMILIES)
    assert "" not in BY_NAME


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architecture)
def test_a_family_is_read_or_refused_with_its_reason(family: Family) -> None:
    config = {"architectures": [family.architecture], "num_hidden_layers": 4, "index_topk": 64}
    if family.unsupported:
        with pytest.raises(CheckpointError, match=re.escape(family.unsupported)):
            Checkpoint.from_config(config)
        return
    checkpoint = Checkpoint.from_config(config)
    assert checkpoint.layer_ids == family.layer_ids(config)
    assert checkpoint.shape["index_topk"] == 64
    if family.refused:  # by the engine, not by the method
        with pytest.raises(CheckpointError, match=re.escape(f"in SGLang: {family.refused}")):
            checkpoint.check_served("this model")
    else:
        checkpoint.check_served("this model")


def test_a_model_without_a_row_is_no_model_without_an_indexer() -> None:
    config = {"architectures": ["NewDsaForCausalLM"], "num_hidden_layers": 4, "index_topk": 64}
    checkpoint = Checkpoint.from_config(config)
    assert str(checkpoint.own) == "FFFF"
    with pytest.raises(CheckpointError, match="which IndexCache does not know"):
        checkpoint.check_served("this model")
    with pytest.raises(CheckpointError, match="no index_topk: its indexer is of another kind"):
        Checkpoint.from_config(config | {"index_topk": None, "index_n_heads": 4})


@each_trainable
@pytest.mark.parametrize("size", SIZES)
def test_a_small_model_is_one_of_its_family(family: Family, size: str) -> None:
    config = small_config(family, size, 512, {"num_hidden_layers": 3})
    checkpoint = Checkpoint.from_config(config)
    assert checkpoint.architecture == family.architecture
    assert str(checkpoint.own) == "FFF"
    assert set(checkpoint.shape) == set(SHAPE_FIELDS)
    assert config["num_key_value_heads"] == config["num_attention_heads"]


@each_trainable
def test_transformers_has_the_family(family: Family) -> None:
    transformers = pytest.importorskip("transformers")
    assert hasattr(transformers, family.architecture)
    config = transformers.AutoConfig.for_model(family.model_type)
    assert config.model_type == family.model_type


@pytest.mark.parametrize("name", SHAPES)
def test_a_published_shape_is_complete(name: str) -> None:
    assert set(SHAPE_FIELDS) <= SHAPES[name].keys()
