"""The distillation loss in a loop of your own: one F layer learns to select for three layers.

    python examples/loss_in_a_loop.py

It needs torch and nothing else. Random tensors stand for a model's: in yours, ``hidden`` and the
attention's queries and keys come from a forward pass of the frozen model (docs/heal.md).
"""

from __future__ import annotations

import torch

from sglang_indexcache import AttentionInputs, IndexInputs, Layout, multi_layer_loss, select_top_k

ROWS, LENGTH, WIDTH, SERVED = 2, 128, 32, 3
INDEX_HEADS, INDEX_WIDTH, TOPK = 4, 16, 16
HEADS, HEAD_WIDTH = 8, 24


def main(steps: int = 30) -> list[float]:
    """Train, print and return the loss of every step, in nats a query."""
    torch.manual_seed(0)
    layout = Layout(torch.zeros(ROWS, LENGTH, dtype=torch.int64))  # one document a row
    hidden = torch.randn(ROWS, LENGTH, WIDTH)  # detached: the loss trains no model
    base = torch.randn(ROWS, HEADS, LENGTH, HEAD_WIDTH)
    attentions = [  # of the F layer itself and the S layers behind it, which attend alike
        AttentionInputs(
            queries=base + 0.3 * torch.randn_like(base),  # [rows, heads, tokens, width]
            keys=base + 0.3 * torch.randn_like(base),  # the same, or with one head
            scale=HEAD_WIDTH**-0.5,
        )
        for _ in range(SERVED)
    ]
    # The F layer's indexer. A real one has a norm and RoPE; apply them before the loss.
    to_queries = torch.nn.Linear(WIDTH, INDEX_HEADS * INDEX_WIDTH)
    to_keys = torch.nn.Linear(WIDTH, INDEX_WIDTH)
    to_weights = torch.nn.Linear(WIDTH, INDEX_HEADS)
    trained = [p for part in (to_queries, to_keys, to_weights) for p in part.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for step in range(steps):
        index = IndexInputs(
            queries=to_queries(hidden).view(ROWS, LENGTH, INDEX_HEADS, INDEX_WIDTH),
            keys=to_keys(hidden),
            weights=to_weights(hidden) * (INDEX_HEADS * INDEX_WIDTH) ** -0.5,
        )
        # The first half learns the attention over all keys, the rest over the selected ones.
        selected = None if step < steps // 2 else select_top_k(index, layout, TOPK, block=64)
        loss = multi_layer_loss(index, attentions, layout, selected) / layout.counted.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"all keys: {losses[0]:.3f} to {losses[steps // 2 - 1]:.3f} nats a query")
    print(f"selected keys: {losses[steps // 2]:.3f} to {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
