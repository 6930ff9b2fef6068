"""The independent oracle: transformers' own DSA models with the same sharing.

GLM-5's modelling code shares indices by ``indexer_types``. DeepSeek-V3.2's does not, so there the
shared layers' indexers are made to return what the full layer before them returned.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sglang_indexcache.pattern import Pattern


@dataclass
class Answer:
    """What the oracle says about one sequence.

    Attributes:
        logprobs: ``[n - 1]`` log-probability of every token but the first.
        next_logits: ``[vocab]`` after the last token.
        margin: smallest relative gap between the k-th and the (k+1)-th index score over all
            layers and rows; below float rounding a selection is a coin toss.
    """

    logprobs: torch.Tensor
    next_logits: torch.Tensor
    margin: float


class Oracle:
    """One checkpoint in transformers, eager attention, any pattern."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.config = AutoConfig.from_pretrained(folder)
        self.layers = self.config.num_hidden_layers
        self._folder, self._dtype = folder, dtype
        self._glm = self.config.model_type == "glm_moe_dsa"
        self._models: dict[str, Any] = {}

    def answer(self, ids: list[int], pattern: Pattern) -> Answer:
        """Run one sequence."""
        model = self._model(pattern)
        margins: list[float] = []
        with torch.no_grad(), _recorded_margins(self.config.index_topk, margins):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0].float()
        logprobs = logits.log_softmax(-1)[:-1]
        targets = torch.tensor(ids[1:], dtype=torch.int64)[:, None]
        return Answer(
            logprobs=logprobs.gather(1, targets).squeeze(1),
            next_logits=logits[-1],
            margin=min(margins, default=float("inf")),
        )

    def greedy(self, ids: list[int], count: int, pattern: Pattern) -> tuple[list[int], float]:
        """``count`` greedy tokens, and the smallest gap that decided any of them.

        The gap is the index margin or the relative lead of the best over the second-best token.
        """
        margins: list[float] = []
        with torch.no_grad(), _recorded_margins(self.config.index_topk, margins):
            output = self._model(pattern).generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                eos_token_id=None,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best, second = torch.cat(output.logits).float().topk(2).values.unbind(-1)
        leads = (best - second) / best.abs().clamp_min(1.0)
        return output.sequences[0, len(ids) :].tolist(), min([*margins, float(leads.min())])

    def _model(self, pattern: Pattern) -> Any:
        if str(pattern) not in self._models:
            if self._glm:
                self.config.indexer_types = pattern.to_indexer_types()
            model = AutoModelForCausalLM.from_pretrained(
                self._folder, config=self.config, dtype=self._dtype, attn_implementation="eager"
            ).eval()
            if not self._glm:
                _share(model, pattern)
            self._models[str(pattern)] = model
        return self._models[str(pattern)]


def _share(model: Any, pattern: Pattern) -> None:
    """Give DeepSeek-V3.2's layers the sharing that its modelling code lacks."""
    held: list[torch.Tensor] = [torch.empty(0)]
    for number, layer in enumerate(model.model.layers):
        indexer = layer.self_attn.indexer
        select = indexer.forward

        def full(*args: Any, select: Any = select, **kwargs: Any) -> torch.Tensor:
            held[0] = select(*args, **kwargs)
            return held[0]

        def shared(*args: Any, **kwargs: Any) -> torch.Tensor:
            return held[0]

        indexer.forward = full if pattern.is_full(number) else shared


@contextmanager
def _recorded_margins(topk: int, margins: list[float]) -> Iterator[None]:
    """Watch the indexers' top-k calls for the gap at the boundary."""
    original = torch.Tensor.topk

    def watched(self: torch.Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        if k == topk and self.dim() == 3 and self.shape[-1] > k:
            values = original(self, k + 1, -1).values
            decided = values[..., k] > -1e30  # masked positions are not candidates
            gap = (values[..., k - 1] - values[..., k]) / values[..., 0].abs().clamp_min(1e-30)
            if decided.any():
                margins.append(float(gap[decided].min()))
        return original(self, k, *args, **kwargs)

    torch.Tensor.topk = watched  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.topk = original  # type: ignore[method-assign]
