"""Routing and the routed experts."""

from __future__ import annotations

import torch

from tests.rehearsal.stage.kernels.quantized import from_blocks, from_groups, quantize_groups
from tests.rehearsal.stage.registry import poison, reference


@reference("flashinfer.fused_moe:fused_topk_deepseek")
def fused_topk_deepseek(  # type: ignore[no-untyped-def]
    logits, bias, groups, topk_group, topk, scaling, weights, ids, launch_with_pdl=True
):
    """Sigmoid scores; the bias counts in choosing, within the best groups, and not in weighing."""
    scores = logits.double().sigmoid()
    biased = scores + bias.double()
    if groups > 1:
        by_group = biased.unflatten(-1, (groups, -1))
        kept_groups = by_group.topk(2, -1)[0].sum(-1).topk(topk_group, -1)[1]
        in_groups = torch.zeros_like(by_group[..., 0]).scatter_(-1, kept_groups, 1).bool()
        biased = by_group.masked_fill(~in_groups[..., None], float("-inf")).flatten(-2)
    experts = biased.topk(topk, -1)[1]
    scores_of_experts = scores.gather(-1, experts)
    weights.copy_(scores_of_experts / scores_of_experts.sum(-1, keepdim=True) * scaling)
    ids.copy_(experts)


@reference("jit:dpsk_v4_mask_topk.run")
def mask_topk(ids: torch.Tensor, tokens: torch.Tensor) -> None:
    """No expert for the rows behind the first ``tokens``, which are padding."""
    assert ids.dtype == tokens.dtype == torch.int32
    assert ids.shape[1] <= 32
    ids[int(tokens) :] = -1


@reference("sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe:fused_experts_impl")
def fused_experts_impl(  # type: ignore[no-untyped-def]
    hidden_states, w1, w2, topk_weights, topk_ids, inplace=False, routed_scaling_factor=None,
    use_fp8_w8a8=False, w1_scale=None, w2_scale=None, block_shape=None, **rest,
):  # fmt: skip
    """Gated experts: ``sum_e weight_e * (silu(x w1) * x w1') w2``, bfloat16 or FP8 by blocks."""
    refused = ("use_int8_w8a8", "apply_router_weight_on_input", "b1", "b2", "a1_scale", "a2_scale")
    assert not any(rest.get(name) is not None and rest.get(name) is not False for name in refused)
    assert not use_fp8_w8a8 or list(block_shape) == [128, 128]

    def times(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if use_fp8_w8a8:
            return from_groups(*quantize_groups(x)) @ from_blocks(weight, scale).T
        return x.double() @ weight.double().T

    scales1, scales2 = (w1_scale, w2_scale) if use_fp8_w8a8 else (w1, w2)
    out = torch.zeros(hidden_states.shape, dtype=torch.float64)
    for expert in range(len(w1)):
        rows, places = (topk_ids == expert).nonzero(as_tuple=True)
        if len(rows):
            x = times(hidden_states[rows], w1[expert], scales1[expert])
            # The kernel rounds between its two products.
            gate, up = x.to(hidden_states.dtype).double().chunk(2, -1)
            hidden = (torch.nn.functional.silu(gate) * up).to(hidden_states.dtype)
            y = times(hidden, w2[expert], scales2[expert])
            out.index_add_(0, rows, y * topk_weights[rows, places, None].double())
    result = (out * (routed_scaling_factor or 1.0)).to(hidden_states.dtype)
    return hidden_states.copy_(result) if inplace else result


@reference("deep_gemm.m_grouped_bf16_gemm_nt_contiguous")
def grouped_bf16_gemm(a, b, d, experts, dims="nk", by_sums=False, *options):  # type: ignore[no-untyped-def]
    """``d[m] = a[m] @ b[experts[m]].T``, 128 rows at a time for one expert; -1 is nobody's row."""
    assert not by_sums, "a layout by running sums has no reference"
    assert a.dtype == b.dtype == d.dtype == torch.bfloat16
    assert experts.dtype == torch.int32
    assert len(a) % 128 == 0
    poison(d)
    for at, of in zip(torch.arange(len(a)).split(128), experts.split(128), strict=True):
        rows = at[of >= 0]
        if len(rows):
            assert (of[: len(rows)] == of[0]).all(), "rows of two experts at a time"
            d[rows] = (a[rows].double() @ b[of[0]].double().T).to(d.dtype)


_EP = "sglang.kernels.ops.moe.ep_moe_kernels"


@reference(_EP + ":ep_scatter")
def ep_scatter(  # type: ignore[no-untyped-def]
    recv_x, recv_x_scale, recv_topk, num_recv_tokens_per_expert, num_valid_tokens_per_expert,
    expert_start_loc, output_tensor, output_tensor_scale, m_indices, output_index, **rest,
):  # fmt: skip
    """Lay received rows side by side for each expert that wants them, by multiples of 128.

    ``output_index`` ``[T, k]`` says where a row went, -1 nowhere; ``m_indices`` whose a place is,
    also beyond the rows that fill it, up to the expert's counted ones.
    """
    assert recv_x.dtype == torch.bfloat16, "FP8 rows have no reference"
    assert len(m_indices) % 128 == 0
    poison(output_tensor)
    output_index.fill_(-1)
    counts = num_recv_tokens_per_expert.tolist()
    starts = [sum(counts[:expert]) for expert in range(len(counts))]
    for expert, (start, count) in enumerate(zip(starts, counts, strict=True)):
        rows, columns = (recv_topk == expert).nonzero(as_tuple=True)
        places = start + torch.arange(len(rows))
        assert len(rows) <= count
        output_tensor[places] = recv_x[rows]
        output_index[rows, columns] = places.to(output_index.dtype)
        valid = int(num_valid_tokens_per_expert[expert])
        m_indices[start : start + count] = -1
        m_indices[start : start + valid] = expert
        expert_start_loc[expert] = start + len(rows)


@reference(_EP + ":ep_gather")
def ep_gather(  # type: ignore[no-untyped-def]
    input_tensor, recv_topk_ids, recv_topk_weight, input_index, output_tensor
):
    """Each row's weighted sum of what its experts made of it, from the places of ``ep_scatter``."""
    total = torch.zeros(output_tensor.shape, dtype=torch.float64)
    rows, columns = (recv_topk_ids >= 0).nonzero(as_tuple=True)
    outputs = input_tensor[input_index[rows, columns].long()].double()
    total.index_add_(0, rows, outputs * recv_topk_weight[rows, columns, None].double())
    output_tensor.copy_(total)
