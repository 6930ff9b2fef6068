"""Routing and the routed experts."""

from __future__ import annotations

import torch

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
    hidden_states, w1, w2, topk_weights, topk_ids, inplace=False, routed_scaling_factor=None, **rest
):
    """Gated experts in bfloat16: ``sum_e weight_e * (silu(x w1) * x w1') w2``."""
    refused = ("use_fp8_w8a8", "use_int8_w8a8", "apply_router_weight_on_input", "b1", "b2")
    assert not any(rest.get(name) is not None and rest.get(name) is not False for name in refused)
    out = torch.zeros(hidden_states.shape, dtype=torch.float64)
    for expert in range(len(w1)):
        rows, which = (topk_ids == expert).nonzero(as_tuple=True)
        if len(rows):
            x = hidden_states[rows].double() @ w1[expert].double().T
            # The kernel rounds between its two products.
            gate, up = x.to(hidden_states.dtype).double().chunk(2, -1)
            hidden = (torch.nn.functional.silu(gate) * up).to(hidden_states.dtype)
            y = hidden.double() @ w2[expert].double().T
            out.index_add_(0, rows, y * topk_weights[rows, which, None].double())
    result = (out * (routed_scaling_factor or 1.0)).to(hidden_states.dtype)
    return hidden_states.copy_(result) if inplace else result
