"""The distillation loss in a trainer with tensor parallelism: torch's own, two processes on a CPU.

    torchrun --nproc-per-node 2 examples/tensor_parallel_loss.py

Two layers of multi-head latent attention under the pattern FS: the indexer of layer 0 selects for
both and learns from the attention of both, while the next-token loss trains everything else. What
a trainer of its own must get right is here:

- Attention heads are split over the processes. p is a mean over all heads, so the processes
  average theirs (``average=``) and all compute the same loss of the same replicated indexer.
- The hidden state is split by tokens between the layers. It is gathered before an indexer reads
  it, so every process has the index keys of all tokens.
- A layer returns its term. Nothing is kept outside of the forward pass, so several micro-batches
  add up, each divided by the queries of the whole step.

``tests/test_examples.py`` holds two processes against one in float64.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from sglang_indexcache import (
    AttentionInputs,
    IndexInputs,
    Layout,
    distillation_loss,
    select_top_k,
)

PATTERN = "FS"
VOCABULARY, HIDDEN, HEADS, TOPK = 64, 32, 4, 8
PLAIN, ROTATED, VALUE = 8, 4, 8
"""Of an attention head: the dimensions of queries and keys without and with RoPE, and of values."""
QUERY_RANK, KV_RANK = 16, 16
INDEX_HEADS, INDEX_WIDTH = 2, 8

Index = tuple[IndexInputs, torch.Tensor]
"""What an F layer hands down: what it scores with, and ``[B, T, k]`` what it selected."""


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate ``[B, T, heads, width]`` (RoPE), the halves of the width being the pairs."""
    half = x.shape[-1] // 2
    speeds = 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = (positions[..., None].to(x.dtype) * speeds).unsqueeze(2)
    first, second = x[..., :half], x[..., half:]
    turned = (
        first * angles.cos() - second * angles.sin(),
        second * angles.cos() + first * angles.sin(),
    )
    return torch.cat(turned, -1)


class Indexer(nn.Module):
    """The lightning indexer; it is small, so every process has all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(QUERY_RANK, INDEX_HEADS * INDEX_WIDTH, bias=False)
        self.wk = nn.Linear(HIDDEN, INDEX_WIDTH, bias=False)
        self.norm = nn.LayerNorm(INDEX_WIDTH)
        self.weights = nn.Linear(HIDDEN, INDEX_HEADS, bias=False)

    def forward(
        self, hidden: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor
    ) -> IndexInputs:
        """Return what it scores with; ``[B, T, HIDDEN]``, ``[B, T, QUERY_RANK]``, ``[B, T]``."""
        queries = self.wq(latent).unflatten(-1, (INDEX_HEADS, INDEX_WIDTH))
        keys = self.norm(self.wk(hidden)).unsqueeze(2)
        weights = self.weights(hidden) * (INDEX_HEADS * INDEX_WIDTH) ** -0.5
        return IndexInputs(rotate(queries, positions), rotate(keys, positions).squeeze(2), weights)


class Attention(nn.Module):
    """Multi-head latent attention over the selected keys, with its distillation term."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.q_a = nn.Linear(HIDDEN, QUERY_RANK, bias=False)
        self.q_b = nn.Linear(QUERY_RANK, HEADS * (PLAIN + ROTATED), bias=False)
        self.kv_a = nn.Linear(HIDDEN, KV_RANK + ROTATED, bias=False)
        self.kv_b = nn.Linear(KV_RANK, HEADS * (PLAIN + VALUE), bias=False)
        self.o = nn.Linear(HEADS * VALUE, HIDDEN, bias=False)
        self.indexer = Indexer() if PATTERN[layer] == "F" else None
        first = PATTERN.rindex("F", 0, layer + 1)
        self.served = len(PATTERN[first + 1 :].partition("F")[0]) + 1
        self.mesh: DeviceMesh | None = None

    def forward(
        self, hidden: torch.Tensor, index: Index | None, layout: Layout, positions: torch.Tensor
    ) -> tuple[torch.Tensor, Index, torch.Tensor]:
        """Return the layer's output, what it hands down, and its term of the loss.

        Args:
            hidden: ``[B, T, HIDDEN]``, all tokens.
            index: of the F layer before; an F layer makes its own.
            layout: who sees whom.
            positions: ``[B, T]``.
        """
        latent = self.q_a(hidden)
        if self.indexer is not None:  # detached: the distillation must not train the model
            index_inputs = self.indexer(hidden.detach(), latent.detach(), positions)
            index = index_inputs, select_top_k(index_inputs, layout, TOPK)
        assert index is not None
        scored, selected = index
        compressed, turned = self.kv_a(hidden).split((KV_RANK, ROTATED), -1)
        # From here on "heads" are those of this process.
        queries = self.q_b(latent).unflatten(-1, (-1, PLAIN + ROTATED))
        keys, values = (
            self.kv_b(compressed).unflatten(-1, (-1, PLAIN + VALUE)).split((PLAIN, VALUE), -1)
        )
        shared_key = rotate(self._for_own_heads(turned).unsqueeze(2), positions)
        keys = torch.cat((keys, shared_key.expand(*keys.shape[:3], -1)), -1)
        plain, turned = queries.split((PLAIN, ROTATED), -1)
        queries = torch.cat((plain, rotate(turned, positions)), -1)
        queries, keys, values = (x.transpose(1, 2) for x in (queries, keys, values))
        scale = (PLAIN + ROTATED) ** -0.5
        mask = layout.attended(slice(0, layout.length), selected).unsqueeze(1)
        output = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
        target = AttentionInputs(queries.detach(), keys.detach(), scale)
        term = distillation_loss(scored, [target], layout, selected, average=self._average)
        return self.o(output.transpose(1, 2).flatten(2)), index, term / self.served

    def _average(self, p: torch.Tensor) -> torch.Tensor:
        """Return the mean over the heads of all processes."""
        if self.mesh is None:
            return p
        total = p.clone()
        dist.all_reduce(total, group=self.mesh.get_group())
        return total / self.mesh.size()

    def _for_own_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Return a key that all heads share: its gradient is the sum over the processes."""
        if self.mesh is None:
            return x
        return DTensor.from_local(x, self.mesh, [Replicate()]).to_local(grad_placements=[Partial()])


class Layer(nn.Module):
    """A layer of the model."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = Attention(number)
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, 2 * HIDDEN, bias=False),
            nn.SiLU(),
            nn.Linear(2 * HIDDEN, HIDDEN, bias=False),
        )

    def forward(
        self, hidden: torch.Tensor, index: Index | None, layout: Layout, positions: torch.Tensor
    ) -> tuple[torch.Tensor, Index, torch.Tensor]:
        """Run :meth:`Attention.forward`, where ``hidden`` holds this process's tokens."""
        attended, index, term = self.attention(self.norm_1(hidden), index, layout, positions)
        hidden = hidden + attended
        return hidden + self.mlp(self.norm_2(hidden)), index, term


class Model(nn.Module):
    """A language model of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer(number) for number in range(len(PATTERN)))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[B, T, VOCABULARY]`` logits, and the distillation loss summed over queries."""
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        hidden, index, terms = self.embedding(ids), None, []
        for layer in self.layers:
            hidden, index, term = layer(hidden, index, layout, positions)
            terms.append(term)
        return self.head(hidden), torch.stack(terms).sum()


def split(model: Model, mesh: DeviceMesh) -> None:
    """Split heads, the MLP and the head over the processes; norms and sums by tokens."""
    gathered = PrepareModuleInput(
        input_layouts=(Shard(1), None, None, None),
        desired_input_layouts=(Replicate(), None, None, None),
        use_local_output=True,
    )
    plan = {
        "norm_1": SequenceParallel(use_local_output=True),
        "norm_2": SequenceParallel(use_local_output=True),
        "attention": gathered,
        "attention.q_b": ColwiseParallel(),
        "attention.kv_b": ColwiseParallel(),
        "attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "mlp.0": ColwiseParallel(input_layouts=Shard(1)),
        "mlp.2": RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
        layer.attention.mesh = mesh
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)


def train_step(
    model: Model, optimizer: torch.optim.Optimizer, batches: Sequence[torch.Tensor]
) -> tuple[float, float]:
    """Take one step over several micro-batches.

    Args:
        model: on this process.
        optimizer: of all its parameters.
        batches: ``[B, T]`` token ids of each micro-batch, the same on every process.

    Returns:
        Nats a token of the next-token loss, and nats a query of the distillation loss.
    """
    tokens = sum(ids[:, 1:].numel() for ids in batches)
    queries = sum(ids.numel() for ids in batches)
    sums = torch.zeros(2, dtype=torch.float64)
    optimizer.zero_grad()
    for ids in batches:
        layout = Layout(torch.zeros_like(ids))
        logits, distilled = model(ids, layout)
        text = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        (text / tokens + distilled / queries).backward()
        sums += torch.stack((text.detach() / tokens, distilled.detach() / queries)).double()
    optimizer.step()
    return float(sums[0]), float(sums[1])


def main() -> None:
    """Train a few steps, printed by the first process."""
    mesh = init_device_mesh("cpu", (int(os.environ.get("WORLD_SIZE", "1")),))
    torch.manual_seed(0)  # all processes make the same model, and then keep their parts
    model = Model()
    split(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = list(torch.randint(VOCABULARY, (4, 2, 32)))
    for step in range(5):
        text, distilled = train_step(model, optimizer, batches)
        if dist.get_rank() == 0:
            print(f"step {step}: text {text:.4f} nats a token, indexer {distilled:.4f} a query")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
