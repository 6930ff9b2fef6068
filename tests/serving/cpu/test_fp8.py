"""Block-FP8 weights that are dequantised on their way into a model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_indexcache.errors import CheckpointError
from sglang_indexcache.serving.adapters.weights import to_block_fp8
from sglang_indexcache.serving.cpu import fp8

SIZE = (4, 8)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    quantised, scales = to_block_fp8(torch.randn(7, 10), SIZE)
    return {"a.weight": quantised, "b.weight": torch.randn(3, 3), "a.weight_scale_inv": scales}


@pytest.mark.parametrize("turn", [1, -1])
def test_a_weight_meets_its_scales_in_any_order(
    tensors: dict[str, torch.Tensor], turn: int
) -> None:
    weights = dict(fp8.plain(list(tensors.items())[::turn], SIZE))
    assert weights.keys() == {"a.weight", "b.weight"}
    assert weights["b.weight"] is tensors["b.weight"]
    for row in range(7):
        for column in range(10):
            scale = tensors["a.weight_scale_inv"][row // 4, column // 8]
            assert (
                weights["a.weight"][row, column] == tensors["a.weight"][row, column].float() * scale
            )


@pytest.mark.parametrize("name", ["a.weight", "a.weight_scale_inv"])
def test_half_of_a_weight(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name]
    with pytest.raises(CheckpointError, match=r"only one of a\.weight and its block scales"):
        dict(fp8.plain(tensors.items(), SIZE))


def test_plain_and_block_fp8_are_read_and_no_other_form() -> None:
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for config in ({**settings, "quant_method": "awq"}, {**settings, "weight_block_size": None}):
        with pytest.raises(CheckpointError, match=f"is quantised .{config['quant_method']}"):
            fp8.overrides(SimpleNamespace(quantization_config=config))
    for plain in ({"quantization_config": {}}, {"quantization_config": None}, {}):
        assert fp8.overrides(SimpleNamespace(**plain)) == {}
    overrides = fp8.overrides(SimpleNamespace(quantization_config=settings))
    assert overrides == {"quantization_config": None, fp8.BLOCKS: [128, 128]}
