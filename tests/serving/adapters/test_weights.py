"""The block-FP8 form of stored weights, against each block looked at alone."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from sglang_indexcache.serving.adapters.weights import to_block_fp8


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(
        first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8)
    )


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    block=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    power_of_two=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_block_fp8_keeps_what_its_format_can(
    shape: tuple[int, int], block: tuple[int, int], power_of_two: bool, seed: int
) -> None:
    """Against each block looked at alone, in float64."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * 10.0 ** int(seed % 7 - 3)
    weight[0] = 0  # a block may hold nothing
    values, scales = to_block_fp8(weight, block, power_of_two=power_of_two)
    assert values.shape == shape
    for i in range(0, shape[0], block[0]):
        for j in range(0, shape[1], block[1]):
            part = np.s_[i : i + block[0], j : j + block[1]]
            scale = float(scales[i // block[0], j // block[1]])
            exact = weight[part].double()
            largest = float(exact.abs().max())
            assert scale > 0
            assert largest <= 448 * scale * (1 + 1e-6)
            if largest:
                assert scale <= largest / 448 * (2 if power_of_two else 1) * (1 + 1e-6)
            if power_of_two:
                assert math.frexp(scale)[0] == 0.5
            # Half a step: 3 bits behind the leading one, and steps of 2^-9 below 2^-6.
            error = (values[part].double() * scale - exact).abs()
            assert (error <= (exact.abs() * 2**-4).clamp_min(scale * 2**-10) * (1 + 1e-6)).all()


def test_what_is_block_fp8_already_stays_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(3)
    values = (torch.randn(256, 384, generator=generator) * 60).clamp(-448, 448)
    values[::128, ::128] = 448.0  # the largest of each block, as quantising leaves it
    values = values.to(torch.float8_e4m3fn)
    scales = torch.exp2(torch.randint(-9, 3, (2, 3), generator=generator).float())
    blocks = torch.ones(128, 128)
    again, scales_again = to_block_fp8(values.float() * torch.kron(scales, blocks))
    assert same_bits(again, values)
    assert torch.equal(scales_again, scales)
