"""The independent oracle: transformers' own DSA models with the same sharing.

GLM-5's modelling code shares indices by ``indexer_types``. DeepSeek-V3.2's does not, so there the
shared layers' indexers are made to return what the full layer before them returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sglang_indexcache.pattern import Pattern


@dataclass
class Answer:
    """Answer of the oracle about one sequence.

    Attributes:
        logprobs: ``[n - 1]`` log-probability of every token but the first.
        behind: ``[n - 1]`` by how much another token than that was likelier; 0 where it is the
            greedy choice.
        next_logits: ``[vocab]`` after the last token.
        margins: ``[n]`` for every row the smallest relative gap between the k-th and the
            (k+1)-th index score in any layer, infinite where nothing has to be left out; below
            rounding a selection is a coin toss.
    """

    logprobs: torch.Tensor
    behind: torch.Tensor
    next_logits: torch.Tensor
    margins: torch.Tensor

    @property
    def margin(self) -> float:
        """Smallest margin of any row."""
        return float(self.margins.min())


def generated(model: Any, ids: torch.Tensor, count: int, **options: Any) -> torch.Tensor:
    """Return ``[1, T + count]``: ``ids`` and what the model greedily says behind it."""
    tokens: torch.Tensor = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=count,
        max_new_tokens=count,
        eos_token_id=None,
        **options,
    )
    return tokens


def load_eager(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Load a checkpoint with transformers' plain attention."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", **options
    ).eval()


class Oracle:
    """One checkpoint in transformers, eager attention, any pattern.

    Args:
        folder: the checkpoint.
        dtype: to compute in.
        fp8_indexer: quantise what the indexers multiply as SGLang's kernels for Hopper do: where
            they quantise queries by themselves scales are powers of two, not where that is fused
            with their rotation (GLM-5), nor where keys are stored.
        first_of_ties: break exact ties as this project's contract says (scores that the ReLU
            made 0 are common), not arbitrarily as ``torch.topk`` does.
        config: replaces fields of the HF config.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        *,
        fp8_indexer: bool = False,
        first_of_ties: bool = True,
        **config: Any,
    ) -> None:
        self.config = AutoConfig.from_pretrained(folder, **config)
        self.layers = self.config.num_hidden_layers
        self.folder, self._dtype = folder, dtype
        self._glm = self.config.model_type == "glm_moe_dsa"
        self._fp8, self._first_of_ties = fp8_indexer, first_of_ties
        self._models: dict[str, Any] = {}
        self._answers: dict[tuple[tuple[int, ...], str], Answer] = {}
        self.prepare: Callable[[torch.nn.Module], None] = lambda _: None
        """Changes a model after it was loaded."""
        self.noise = 0.0
        """Relative, put on what is quantised: what changes with it hangs on float32's last bits."""

    def answer(self, ids: list[int], pattern: Pattern) -> Answer:
        """Run one sequence, or remember its answer, which only noise changes."""
        if self.noise:
            return self._answer(ids, pattern)
        key = tuple(ids), str(pattern)
        if key not in self._answers:
            self._answers[key] = self._answer(ids, pattern)
        return self._answers[key]

    def _answer(self, ids: list[int], pattern: Pattern) -> Answer:
        model = self._model(pattern)
        margins = [torch.full((len(ids),), torch.inf)]
        with torch.no_grad(), self._watched(margins):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0].float()
        logprobs = logits.log_softmax(-1)[:-1]
        targets = torch.tensor(ids[1:], dtype=torch.int64)[:, None]
        logprobs_of_ids = logprobs.gather(1, targets).squeeze(1)
        return Answer(
            logprobs=logprobs_of_ids,
            behind=logprobs.amax(-1) - logprobs_of_ids,
            next_logits=logits[-1],
            margins=torch.stack(margins).amin(0),
        )

    def greedy_behind(
        self, ids: list[int], answer: list[int], pattern: Pattern
    ) -> tuple[list[int], float]:
        """Return the greedy token at each place of an answer, and the smallest gap up to there.

        An answer that equals them is the greedy one, and the first token that does not is wrong:
        what comes behind it decides nothing. One forward reads all of it.

        The gap is the index margin or the relative lead of the best over the second-best token.
        """
        margins = [torch.full((len(ids) + len(answer) - 1,), torch.inf)]
        with torch.no_grad(), self._watched(margins):
            read = torch.tensor([ids + answer[:-1]])
            logits = self._model(pattern)(read, use_cache=False).logits[0, len(ids) - 1 :].float()
        tokens = logits.argmax(-1).tolist()
        differing = (
            n for n, pair in enumerate(zip(tokens, answer, strict=True)) if len({*pair}) > 1
        )
        end = next(differing, len(answer) - 1) + 1
        best, second = logits[:end].topk(2).values.unbind(-1)
        leads = (best - second) / best.abs().clamp_min(1.0)
        selected = torch.stack(margins).amin(0)[: len(ids) + end - 1]
        return tokens, min(float(leads.min()), float(selected.min()))

    @contextmanager
    def _watched(self, margins: list[torch.Tensor]) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(
                _recorded_margins(self.config.index_topk, margins, self._first_of_ties)
            )
            if self._fp8:
                stack.enter_context(fp8_scores(self.noise, is_glm=self._glm))
            yield

    def _model(self, pattern: Pattern) -> Any:
        if str(pattern) not in self._models:
            if self._glm:
                self.config.indexer_types = pattern.to_indexer_types()
            model = load_eager(self.folder, config=self.config, dtype=self._dtype)
            if not self._glm:
                _share(model, pattern)
            self.prepare(model)
            self._models[str(pattern)] = model
        return self._models[str(pattern)]


def _share(model: Any, pattern: Pattern) -> None:
    """Give DeepSeek-V3.2's layers the sharing that its modelling code lacks."""
    indices: list[torch.Tensor] = [torch.empty(0)]
    for number, layer in enumerate(model.model.layers):
        indexer = layer.self_attn.indexer
        select = indexer.forward

        def full(*args: Any, select: Any = select, **kwargs: Any) -> torch.Tensor:
            indices[0] = select(*args, **kwargs)
            return indices[0]

        def shared(*args: Any, **kwargs: Any) -> torch.Tensor:
            return indices[0]

        indexer.forward = full if pattern.is_full(number) else shared


@contextmanager
def _recorded_margins(
    topk: int, margins: list[torch.Tensor], first_of_ties: bool
) -> Iterator[None]:
    """Watch the indexers' top-k calls for the gap at the boundary, and break its ties."""
    original, lists = torch.Tensor.topk, {topk, 2 * topk, 4 * topk}  # candidates, too

    def watched(self: torch.Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        if k in lists and self.dim() == 3 and self.shape[-1] > k:
            values = original(self, k + 1, -1).values
            decided = values[..., k] > -1e30  # masked positions are not candidates
            gap = (values[..., k - 1] - values[..., k]) / values[..., 0].abs().clamp_min(1e-30)
            if first_of_ties:
                decided &= (values[..., k - 1] != values[..., k]) | (values[..., k] != 0)
            margins.append(gap.float().masked_fill(~decided, torch.inf)[0])
            if first_of_ties:
                ordered = self.sort(dim=-1, descending=True, stable=True)
                return torch.return_types.topk((ordered.values[..., :k], ordered.indices[..., :k]))
        return original(self, k, *args, **kwargs)

    torch.Tensor.topk = watched  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.topk = original  # type: ignore[method-assign]


@contextmanager
def fp8_scores(noise: float, *, is_glm: bool) -> Iterator[None]:
    """Quantise what the indexers multiply as engines do: e4m3, with one scale a vector.

    transformers leaves out both this and the Hadamard rotation before it.
    """
    original = torch.matmul

    def watched(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        is_score = a.dim() == 4 and b.dim() == 4 and b.shape[1] == 1 and a.shape[-1] == 128
        if is_score:  # [B, S, H, D] @ [B, 1, D, T], in the indexers only
            a, b = (x * (1 + noise * torch.randn(x.shape)) for x in (a, b)) if noise else (a, b)
            a = _as_e4m3(a, rotated=not is_glm, power_of_two=not is_glm)
            b = _as_e4m3(b.mT, rotated=not is_glm, power_of_two=False).mT
        return original(a, b, *args, **kwargs)

    torch.matmul = watched  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.matmul = original


def _as_e4m3(x: torch.Tensor, *, rotated: bool, power_of_two: bool) -> torch.Tensor:
    """Return ``x`` ``[..., D]`` as it comes back from e4m3 storage, float32."""
    if rotated:
        order = torch.arange(x.shape[-1])
        # Sylvester's Hadamard matrix: the sign is the parity of the common bits of i and j.
        common = order[:, None] & order
        parity = sum((common >> bit) & 1 for bit in range(7)) % 2
        x = x.float() @ (1.0 - 2.0 * parity) / x.shape[-1] ** 0.5
    amax = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = 2.0 ** torch.ceil(torch.log2(amax / 448.0)) if power_of_two else amax / 448.0
    return (x.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() * scale
