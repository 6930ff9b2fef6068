"""Block-FP8 weights that are dequantised on their way into a model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_indexcache.errors import CheckpointError
from sglang_indexcache.serving.cpu import fp8
from sglang_indexcache.stored import to_block_fp8

SIZE = (4, 8)


@pytest.fixture
def stored() -> dict[str, torch.Tensor]:
    quantised, scales = to_block_fp8(torch.randn(7, 10), SIZE)
    return {"a.weight": quantised, "b.weight": torch.randn(3, 3), "a.weight_scale_inv": scales}


@pytest.mark.parametrize("turn", [1, -1])
def test_a_weight_meets_its_scales_in_any_order(stored: dict[str, torch.Tensor], turn: int) -> None:
    found = dict(fp8.plain(list(stored.items())[::turn], SIZE))
    assert found.keys() == {"a.weight", "b.weight"}
    assert found["b.weight"] is stored["b.weight"]
    for row in range(7):
        for column in range(10):
            scale = stored["a.weight_scale_inv"][row // 4, column // 8]
            assert found["a.weight"][row, column] == stored["a.weight"][row, column].float() * scale


@pytest.mark.parametrize("lost", ["a.weight", "a.weight_scale_inv"])
def test_half_of_a_weight(stored: dict[str, torch.Tensor], lost: str) -> None:
    del stored[lost]
    with pytest.raises(CheckpointError, match=r"only one of a\.weight and its block scales"):
        dict(fp8.plain(stored.items(), SIZE))


def test_other_checkpoints_are_left_alone() -> None:
    told = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for config in ({}, {**told, "quant_method": "awq"}, {**told, "weight_block_size": None}, None):
        assert fp8.overrides(SimpleNamespace(quantization_config=config)) == {}
    assert fp8.overrides(SimpleNamespace()) == {}
    found = fp8.overrides(SimpleNamespace(quantization_config=told))
    assert found == {"quantization_config": None, fp8.BLOCKS: [128, 128]}
