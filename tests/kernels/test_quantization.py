"""Index-K quantisation and the 64-token page layout."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_indexcache.kernels.contract import page_bytes
from sglang_indexcache.kernels.indexer import quantization as q


@pytest.mark.parametrize("power_of_two", [True, False])
def test_error_is_within_half_a_step(generator: torch.Generator, power_of_two: bool) -> None:
    x = torch.randn(200, 128, generator=generator) * torch.logspace(-6, 6, 200)[:, None]
    values, scales = q.quantize_e4m3(x, power_of_two=power_of_two)
    restored = values.double() * scales[:, None].double()
    # e4m3 has 3 mantissa bits: half a step is 2^-4 of the value, or half the smallest subnormal.
    bound = torch.maximum(x.double().abs() * 2**-4, scales[:, None].double() * 2**-10)
    assert ((restored - x.double()).abs() <= bound * 1.0001).all()
    rounded = torch.exp2(torch.log2(scales).round())
    least = x.abs().amax(1).clamp_min(q.AMAX_FLOOR) / q.E4M3_MAX
    assert torch.equal(scales, rounded if power_of_two else least)


@given(st.floats(1e-3, 1e6))
def test_scale_is_the_smallest_power_of_two_that_fits(peak: float) -> None:
    x = torch.full((1, 128), peak)
    _, scale = q.quantize_e4m3(x, power_of_two=True)
    assert x.max() / scale <= q.E4M3_MAX
    assert x.max() / (scale / 2) > q.E4M3_MAX or math.isclose(peak / float(scale) * 2, q.E4M3_MAX)


def test_zero_row_is_zero() -> None:
    values, scales = q.quantize_e4m3(torch.zeros(3, 128))
    assert (values.float() == 0).all()
    assert torch.isfinite(scales).all()


def test_hadamard_keeps_dot_products(generator: torch.Generator) -> None:
    a = torch.randn(7, 128, generator=generator, dtype=torch.float64)
    b = torch.randn(5, 128, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(q.hadamard(a) @ q.hadamard(b).T, a @ b.T, rtol=1e-5, atol=1e-5)


def test_hadamard_is_the_sylvester_matrix() -> None:
    expected = torch.tensor([[1.0]])
    while expected.shape[0] < 128:
        expected = torch.cat(
            [torch.cat([expected, expected], 1), torch.cat([expected, -expected], 1)]
        )
    torch.testing.assert_close(q.hadamard(torch.eye(128)), expected / math.sqrt(128))


def test_pages_hold_keys_then_scales(generator: torch.Generator) -> None:
    assert page_bytes(128) == 8448
    pages = torch.full((4, 8448), 0xEE, dtype=torch.uint8)
    slots = torch.tensor([0, 63, 64, 200])
    values, scales = q.quantize_e4m3(torch.randn(4, 128, generator=generator))
    q.write_pages(pages, slots, values, scales)
    # By hand: slot 200 is page 3, offset 8.
    assert torch.equal(pages[3, 8 * 128 : 9 * 128], values[3].view(torch.uint8))
    scale_bytes = pages[3, 64 * 128 + 8 * 4 : 64 * 128 + 9 * 4]
    assert torch.equal(scale_bytes.view(torch.float32), scales[3:])
    read_values, read_scales = q.read_pages(pages, slots, 128)
    assert torch.equal(read_values.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(read_scales, scales)
    untouched = torch.ones(4, 8448, dtype=torch.bool)
    for slot in slots.tolist():
        page, offset = divmod(slot, 64)
        untouched[page, offset * 128 : (offset + 1) * 128] = False
        untouched[page, 8192 + offset * 4 : 8192 + (offset + 1) * 4] = False
    assert (pages[untouched] == 0xEE).all()
