"""Speculative decoding with one draft at each step: a chain of tokens, and how much of it holds."""

from __future__ import annotations

import torch

from tests.rehearsal.stage.kernels.dense import rms
from tests.rehearsal.stage.registry import reference


@reference("jit:fused_eh_norm.fused_eh_norm")
def fused_eh_norm(embedding, hidden, weight_e, weight_h, out, eps):  # type: ignore[no-untyped-def]
    """Write the norms of a token's embedding and of the hidden states before it, side by side."""
    out.copy_(torch.cat((rms(embedding, weight_e, eps), rms(hidden, weight_h, eps)), -1))


@reference("jit:speculative_tree.build_tree_kernel_efficient")
def build_tree(  # type: ignore[no-untyped-def]
    parents, selected, lengths, mask, positions, index, next_token, next_sibling,
    topk, depth, drafts, mode,
):  # fmt: skip
    """Link the tokens to verify: ``drafts`` a request, the newest known one and its chain.

    The mask says for each token which of its request's it sees, known ones in front; of those the
    kernel writes none.
    """
    assert topk == 1, "a chain, not a tree"
    assert mode == 0, "the full mask"
    steps = torch.arange(drafts)
    positions.copy_((lengths[:, None] + steps).flatten())
    index.copy_(torch.arange(index.numel()).view_as(index))
    next_token.copy_(torch.where(steps + 1 < drafts, steps + 1, -1).expand_as(next_token))
    next_sibling.fill_(-1)
    at = 0
    for length in lengths.tolist():
        rows = mask[at : at + drafts * (length + drafts)].view(drafts, length + drafts)
        rows[:, length:] = torch.ones(drafts, drafts).tril().to(mask.dtype)
        at += rows.numel()


@reference("jit:speculative_tree.verify_tree_greedy")
def verify_greedy(  # type: ignore[no-untyped-def]
    predicts, accepted, count, candidates, index, next_token, next_sibling, target
):
    """Follow a request's tokens as long as the target would have chosen the next one too.

    ``predicts`` gets the target's choice behind each accepted token, ``accepted`` their places in
    the batch, the first one's too, and ``count`` how many came after that.
    """
    choices = target.flatten()
    for b in range(len(candidates)):
        at, path = 0, [int(index[b, 0])]
        while len(path) < accepted.shape[1]:
            at = int(next_token[b, at])
            while at >= 0 and candidates[b, at] != choices[path[-1]]:
                at = int(next_sibling[b, at])
            if at < 0:
                break
            path.append(int(index[b, at]))
        accepted[b, : len(path)] = torch.tensor(path, dtype=accepted.dtype)
        predicts[path] = choices[path].to(predicts.dtype)
        count[b] = len(path) - 1
