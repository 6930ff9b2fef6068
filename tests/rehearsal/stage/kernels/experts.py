"""Routing and the routed experts."""

from __future__ import annotations

import torch

from tests.rehearsal.stage.kernels.quantized import from_blocks, from_groups, quantize_groups
from tests.rehearsal.stage.registry import reference


@reference("sglang.srt.layers.moe.topk:_fused_topk_deepseek")
def fused_topk_deepseek(  # type: ignore[no-untyped-def]
    logits, bias, groups, topk_group, topk, scaling, weights, ids, launch_with_pdl=True
):
    """Sigmoid scores; the bias counts in choosing, within the best groups, and not in weighing."""
    scores = logits.double().sigmoid()
    biased = scores + bias.double()
    if groups > 1:
        by_group = biased.unflatten(-1, (groups, -1))
        kept_groups = by_group.topk(2, -1)[0].sum(-1).topk(topk_group, -1)[1]
        kept = torch.zeros_like(by_group[..., 0]).scatter_(-1, kept_groups, 1).bool()
        biased = by_group.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    chosen = biased.topk(topk, -1)[1]
    picked = scores.gather(-1, chosen)
    weights.copy_(picked / picked.sum(-1, keepdim=True) * scaling)
    ids.copy_(chosen)


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
        rows, which = (topk_ids == expert).nonzero(as_tuple=True)
        if len(rows):
            x = times(hidden_states[rows], w1[expert], scales1[expert])
            # The kernel rounds between its two products.
            gate, up = x.to(hidden_states.dtype).double().chunk(2, -1)
            hidden = (torch.nn.functional.silu(gate) * up).to(hidden_states.dtype)
            y = times(hidden, w2[expert], scales2[expert])
            out.index_add_(0, rows, y * topk_weights[rows, which, None].double())
    result = (out * (routed_scaling_factor or 1.0)).to(hidden_states.dtype)
    return hidden_states.copy_(result) if inplace else result
