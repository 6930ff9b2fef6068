"""The reference evaluator: the checkpoint in transformers, one process, CPU or one GPU.

Patterns are applied by :func:`sglang_indexcache.hf.share`. Layers below the first difference from
an earlier run of the same sequence are not run again, because their outputs are kept. Queries are
scored and attend in blocks, only to the tokens that they can see, which is several times as fast on
a CPU as all at once.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_indexcache.checkpoint import Checkpoint, fp8_blocks, reading
from sglang_indexcache.errors import SearchError
from sglang_indexcache.hf import SharedForward, share
from sglang_indexcache.lab.data.marking import Mask
from sglang_indexcache.lab.index_inputs import project
from sglang_indexcache.lab.search.calibration import Calibration
from sglang_indexcache.lab.search.evaluators import LISTS, RATINGS, Floats, TokenEvaluator
from sglang_indexcache.lab.search.judged import TokenChanges
from sglang_indexcache.models import TRAINABLE
from sglang_indexcache.pattern import Pattern

BLOCK = 256
"""Number of queries that are scored, attend or predict at a time, small enough for a CPU's
cache."""
WORST = 0.1
"""Share of places at which a layer's list may be worse than its rating."""
_EAGER = "eager_attention_forward"
"""Name of the function in a transformers model with which layers attend in "eager" mode."""
_KEPT_RUNS = 3
"""Number of runs per sequence whose layer outputs are kept; runs share equal layers."""


def blocks(length: int) -> list[slice]:
    """Cut ``length`` queries into blocks of :data:`BLOCK`."""
    return [slice(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK)]


def attend_in_blocks(
    eager: Callable[..., Any],
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute transformers' ``eager`` attention, causal and without a cache, in blocks."""
    outputs = [
        eager(
            module,
            query[:, :, rows],
            key[:, :, : rows.stop],
            value[:, :, : rows.stop],
            mask[..., rows, : rows.stop],
            **options,
        )[0]
        for rows in blocks(query.shape[2])
    ]
    return torch.cat(outputs, dim=1), None


def select_in_blocks(indexer: Any) -> Callable[..., torch.Tensor]:
    """Return a forward that selects like the DSA ``indexer``, causal and in blocks.

    Its arguments are those of the indexer's own forward. A positive factor of all scores (the
    softmax scale, ``n_heads``) changes no selection and is left out.
    """
    interleaved = TRAINABLE[indexer.config.model_type].interleaved

    @torch.no_grad()
    def forward(
        hidden_states: torch.Tensor,
        q_resid: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        projected = project(
            indexer, hidden_states, q_resid, position_embeddings, interleaved=interleaved
        )
        queries, keys, weights = (each.float() for each in projected)
        allowed = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        length = keys.shape[1]
        visible = allowed.expand(*queries.shape[:2], length)
        count = min(indexer.index_topk, length)
        lists = []
        for rows in blocks(length):
            products = torch.einsum("bshd,btd->bsht", queries[:, rows], keys[:, : rows.stop])
            scores = torch.einsum("bsht,bsh->bst", products.relu_(), weights[:, rows])
            scores.masked_fill_(~visible[:, rows, : rows.stop], -torch.inf)
            # Rows are as long as in transformers, so that topk breaks ties in the same way.
            unseen = (0, length - rows.stop)
            scores = torch.nn.functional.pad(scores, unseen, value=-torch.inf)
            lists.append(scores.topk(count).indices)
        return torch.cat(lists, dim=1).to(torch.int32)

    return forward


@dataclass
class _Run:
    """Layer outputs of one forward.

    Attributes:
        hidden: entry l is the input of layer l, ``[1, length, hidden]``; the last is the output.
        indices: entry l has the indices of layer l, in the form of :class:`SharedForward`.
    """

    pattern: Pattern
    hidden: list[torch.Tensor] = field(default_factory=list)
    indices: list[torch.Tensor] = field(default_factory=list)


class TransformersEvaluator(TokenEvaluator):
    """Teacher-forced losses by transformers.

    Args:
        dtype: a torch dtype's name.
        reuse_bytes: memory for kept layer outputs; 0 runs every layer every time.

    Attributes:
        layer_tokens: number of tokens forwarded so far, times the layers that they passed.

    Raises:
        SearchError: transformers' layers are called in several ways, or have two attentions.
        CheckpointError: the weights have a form that cannot be read.
    """

    in_flight = 1
    by_batch = True  # because a sequence's layer outputs are kept

    def __init__(
        self,
        folder: Path,
        calibration: Calibration,
        dtype: str = "float32",
        reuse_bytes: int = 4 << 30,
    ) -> None:
        from transformers import (
            MODEL_FOR_CAUSAL_LM_MAPPING,
            AutoConfig,
            AutoModelForCausalLM,
            AutoModelForImageTextToText,
        )

        super().__init__(calibration)
        self.kind = f"transformers {dtype}"
        fp8_blocks(folder)
        with reading(f"the config of {folder}"):
            config = AutoConfig.from_pretrained(folder)
        checkpoint = Checkpoint.from_config(config, str(folder))
        self.own = checkpoint.own
        self.num_layers = checkpoint.num_layers
        self.topk = int(checkpoint.shape["index_topk"])
        of_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        kind = AutoModelForCausalLM if of_text else AutoModelForImageTextToText
        self._model = kind.from_pretrained(
            folder, config=config, dtype=getattr(torch, dtype), attn_implementation="eager"
        ).eval()
        self._decoder = self._model.get_decoder()
        layers = self._decoder.layers
        if not all(hasattr(layer.self_attn, "indexer") for layer in layers):
            raise SearchError(f"{folder} has layers without DSA, which this evaluator cannot run")
        self._layers = list(layers)
        if config.model_type in TRAINABLE:
            for number in self.own.full_layers:
                indexer = self._attention(number).indexer
                indexer.forward = select_in_blocks(indexer)
        self._reuse_bytes = reuse_bytes
        self.layer_tokens = 0
        self._runs: OrderedDict[tuple[int, ...], list[_Run]] = OrderedDict()
        # Outputs of all F's last layer at the counted places, with which every pattern is compared.
        self._full: dict[int, torch.Tensor] = {}
        self._length = 0
        self._arguments: dict[str, Any] = {}

    # -- losses -------------------------------------------------------------------------------

    def token_losses(self, pattern: Pattern, batches: Sequence[int]) -> list[Floats]:
        """See :class:`~sglang_indexcache.lab.search.evaluators.TokenEvaluator`."""
        pattern.check_checkpoint(self.own)
        data, counted = self.calibration.sequences, self.calibration.counted
        return [self._sequence(pattern, data[batch], counted[batch]) for batch in batches]

    def _sequence(self, pattern: Pattern, ids: tuple[int, ...], mask: Mask) -> Floats:
        hidden = self.run(pattern, ids).hidden[-1]
        losses = np.full(len(ids) - 1, np.nan)
        targets = torch.tensor(ids[1:], device=hidden.device)
        counted = np.flatnonzero(mask)
        for rows in blocks(len(counted)):
            places = torch.from_numpy(counted[rows])
            with torch.no_grad():
                logits = self._model.lm_head(self._decoder.norm(hidden[0, places])).float()
                part = torch.nn.functional.cross_entropy(logits, targets[places], reduction="none")
            losses[places] = part.double().cpu().numpy()
        return losses

    def changes(self, pattern: Pattern, batches: Sequence[int]) -> list[TokenChanges]:
        """See :class:`~sglang_indexcache.lab.search.evaluators.TokenEvaluator`."""
        pattern.check_checkpoint(self.own)
        return [self._changes(pattern, batch) for batch in batches]

    @torch.no_grad()
    def _changes(self, pattern: Pattern, batch: int) -> TokenChanges:
        ids = self.calibration.sequences[batch]
        counted = np.flatnonzero(self.calibration.counted[batch])
        places = torch.from_numpy(counted)
        if batch not in self._full:  # it comes first: every other pattern reuses its layers
            self._full[batch] = self.run(self.own, ids).hidden[-1][0, places]
        full = hidden = self._full[batch]
        if pattern != self.own:
            hidden = self.run(pattern, ids).hidden[-1][0, places]
        values = np.full((4, len(ids) - 1), np.nan)
        targets = torch.tensor(ids[1:], device=hidden.device)[places]
        for rows in blocks(len(counted)):
            before, after = (self._log_probabilities(x[rows]) for x in (full, hidden))
            likeliest, text = after.argmax(-1), targets[rows]
            part = (
                -after.gather(1, text[:, None])[:, 0],
                (before.exp() * (before - after)).sum(-1),
                likeliest == before.argmax(-1),
                likeliest == text,
            )
            values[:, counted[rows]] = (
                torch.stack([column.double() for column in part]).cpu().numpy()
            )
        return TokenChanges(*values)

    def _log_probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 log-probabilities ``[queries, vocabulary]`` from the last layer."""
        logits = self._model.lm_head(self._decoder.norm(hidden)).float()
        return torch.log_softmax(logits, dim=-1)

    # -- one forward --------------------------------------------------------------------------

    def run(
        self, pattern: Pattern, ids: tuple[int, ...], watch: Callable[..., None] | None = None
    ) -> _Run:
        """Return every layer's input and indices under ``pattern``, for one sequence.

        Args:
            watch: called before each layer attends, with the selection, the model's eager attention
                and its arguments. If it is given, every layer runs.
        """
        runs = self._runs.setdefault(ids, [])
        self._runs.move_to_end(ids)
        known = runs if watch is None else []
        nearest = max(known, key=lambda run: common_layers(run.pattern, pattern), default=None)
        start = 0 if nearest is None else common_layers(nearest.pattern, pattern)
        if nearest is not None:  # keep longest the run that others start from
            runs.sort(key=lambda run: run is not nearest)
        if nearest is not None and start == self.num_layers:
            return nearest
        self._learn_arguments(len(ids))
        run = _Run(pattern)

        def attend(*arguments: Any, **options: Any) -> tuple[torch.Tensor, None]:
            if watch is not None:
                watch(sharing.indices, *arguments, **options)
            return attend_in_blocks(*arguments, **options)

        with torch.no_grad(), share(self._model, pattern) as sharing:
            if nearest is None:
                hidden = self._decoder.embed_tokens(self._tensor(ids))
            else:
                run.hidden, run.indices = nearest.hidden[:start], nearest.indices[:start]
                hidden = nearest.hidden[start]
                hold(sharing, pattern.source_of(start - 1), run.indices[-1])
            for number in range(start, self.num_layers):
                run.hidden.append(hidden)
                hidden = self._layer(number, hidden, sharing, attend)
                assert sharing.indices is not None
                run.indices.append(sharing.indices)
            run.hidden.append(hidden)
        self.layer_tokens += len(ids) * (self.num_layers - start)
        if watch is None:  # a watched run is not needed again
            self._keep(runs, run)
        return run

    def _tensor(self, ids: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([ids], device=self._model.device)

    def _learn_arguments(self, length: int) -> None:
        """Capture the other arguments of the model's layers at this length: mask, positions, ..."""
        if self._length != length:  # one length at a time, because a mask is large
            self._length, self._arguments = length, self._watch(self._tensor((0,) * length))

    @torch.no_grad()
    def _watch(self, inputs: torch.Tensor) -> dict[str, Any]:
        """Return the keyword arguments with which transformers calls every layer."""
        captured: dict[str, Any] = {}

        def note(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
            captured.update(kwargs)
            raise _SeenError

        handle = self._decoder.layers[0].register_forward_pre_hook(note, with_kwargs=True)
        try:
            self._model(inputs, use_cache=False)
        except _SeenError:
            pass
        finally:
            handle.remove()
        captured.pop("prev_topk_indices", None)
        return captured

    def _layer(
        self,
        number: int,
        hidden: torch.Tensor,
        sharing: SharedForward,
        attend: Callable[..., Any] = attend_in_blocks,
    ) -> torch.Tensor:
        """Run a layer, which attends by ``attend``."""
        arguments = dict(self._arguments)
        if self._attention(number).indexer is None:
            arguments["prev_topk_indices"] = sharing.indices
        with self._attending(attend):
            output = self._layers[number](hidden, **arguments)
        after: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return after

    @contextmanager
    def _attending(self, attend: Callable[..., Any]) -> Iterator[None]:
        """Replace the model's eager attention by ``attend``, called with it and its arguments."""
        module: Any = sys.modules[type(self._attention(0)).__module__]
        eager = getattr(module, _EAGER, None)
        if eager is not None:
            setattr(module, _EAGER, partial(attend, eager))
        try:
            yield
        finally:
            if eager is not None:
                setattr(module, _EAGER, eager)

    def _attention(self, number: int) -> Any:
        return self._layers[number].self_attn

    def _keep(self, runs: list[_Run], run: _Run) -> None:
        """Keep the newest runs of the most recently used sequences within the memory limit."""
        if self._reuse_bytes < self._bytes(run) * (_KEPT_RUNS + 1) / _KEPT_RUNS:
            return
        runs.insert(0, run)
        del runs[_KEPT_RUNS:]
        while (
            sum(self._bytes(layers[0]) for layers in self._runs.values() if layers)
            > self._reuse_bytes
        ):
            self._runs.popitem(last=False)

    def _bytes(self, run: _Run) -> int:
        """Return the most bytes of a sequence's kept runs, as if they shared no layers."""
        size = run.hidden[0].nbytes + run.indices[0].nbytes
        return size * (self.num_layers + 1) * _KEPT_RUNS

    # -- what layers put out ------------------------------------------------------------------

    def similarity(self, batch: int) -> Floats:
        """Compare layers' outputs with their own indices and with other layers' indices.

        Returns:
            ``[1, N, N]`` float64; entry (0, i, j), j < i, is the mean cosine similarity between
            layer i's core attention output (before the output projection) with its own indices and
            with layer j's, over the batch's queries. 1 on the diagonal, 0 above it.
        """
        ids = self.calibration.sequences[batch]
        run = self.run(self.own, ids)
        self._learn_arguments(len(ids))
        matrix = np.eye(self.num_layers)
        barred = Pattern.from_layers(self.num_layers, [0])  # all later layers reuse held indices
        with torch.no_grad(), share(self._model, barred) as sharing:
            for layer in range(1, self.num_layers):
                outputs: list[torch.Tensor] = []
                handle = self._attention(layer).o_proj.register_forward_pre_hook(
                    lambda _module, args, to=outputs: to.append(args[0][0].float())
                )
                for j in range(layer + 1):
                    hold(sharing, 0, run.indices[j])
                    self._layer(layer, run.hidden[layer], sharing)
                handle.remove()
                *shared_outputs, own_output = outputs
                for j, output in enumerate(shared_outputs):
                    similarity = torch.cosine_similarity(own_output, output, dim=-1)
                    matrix[layer, j] = float(similarity.mean())
        return matrix[None]

    def kept_mass(self, batch: int) -> Floats:
        """Compare the attention that each head has on its layer's list and on other layers' lists.

        Attention is over all tokens that a query sees, at the batch's counted queries. Only a
        list's best tokens are compared, at most one for every :data:`LISTS` tokens of the text.

        Returns:
            ``[2, N, N]`` float64, as from :func:`lost_by_worst_head`.

        Raises:
            SearchError: the model's attention does not return its weights.
        """
        ids, counted = self.calibration.sequences[batch], self.calibration.counted[batch]
        queries = torch.from_numpy(np.flatnonzero(counted)).to(self._model.device)
        best = max(len(ids) // LISTS, 1)

        def at_queries(indices: torch.Tensor) -> torch.Tensor:  # [queries, k], best first
            return indices.where(indices >= 0, len(ids))[0, queries, :best]

        lists: list[torch.Tensor] = []
        matrices = np.eye(self.num_layers)[None].repeat(RATINGS, axis=0)

        def watch(selected: torch.Tensor, *call: Any, **options: Any) -> None:
            lists.append(at_queries(selected))
            layer = len(lists) - 1
            if layer:
                mass = [
                    mass_on([part[rows] for part in lists], weights)
                    for rows, weights in self._weights(queries, *call, **options)
                ]
                rated = lost_by_worst_head(np.concatenate(mass, axis=2))
                matrices[:, layer, :layer] = rated[:, :layer]

        self.run(self.own, ids, watch)
        if not lists:
            raise SearchError(
                f"{type(self._attention(0)).__name__} does not show its attention, by which a "
                "search without --url compares layers. Search with --method greedy."
            )
        return matrices

    def _weights(
        self,
        queries: torch.Tensor,
        eager: Callable[..., Any],
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _: torch.Tensor,
        **options: Any,
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield a layer's attention to all tokens that queries see, for some ``queries`` at a time.

        Each item is a slice of ``queries`` and ``[heads, some, T]`` float32, where T is the number
        of tokens that the last of them sees.
        """
        visible = self._arguments["attention_mask"]
        for rows in blocks(len(queries)):
            places = queries[rows]
            end = int(places[-1]) + 1
            seen = key[:, :, :end], value[:, :, :end, :0]  # no values: only the weights are needed
            mask = visible[..., places, :end]
            yield rows, eager(module, query[:, :, places], *seen, mask, **options)[1][0].float()


class _SeenError(Exception):
    """Exception that ends a forward whose arguments were captured."""


def mass_on(lists: Sequence[torch.Tensor], weights: torch.Tensor) -> Floats:
    """Sum the attention that heads give to the positions of each list.

    Args:
        lists: each ``[Q, k]``; a position from T on has 0.
        weights: ``[heads, Q, T]`` float32.

    Returns:
        ``[lists, heads, Q]`` float32.
    """
    end = weights.shape[-1]
    table = torch.nn.functional.pad(weights.movedim(0, -1), (0, 0, 0, 1)).flatten(0, 1)
    first = torch.arange(0, len(table), end + 1, device=table.device)[:, None]
    sums = [
        torch.nn.functional.embedding_bag(indices.clamp(max=end) + first, table, mode="sum")
        for indices in lists
    ]
    total: Floats = torch.stack(sums).mT.cpu().numpy()
    return total


def lost_by_worst_head(mass: Floats) -> Floats:
    """Rate lists by the attention that a layer loses under each; its own list is the last.

    In running text hardly any head needs to look far back, so a mean over all places hides what a
    head loses at the few that matter. Therefore the rating by the worst tenth of places comes
    first.

    Args:
        mass: ``[lists, heads, places]``, the share of a head's attention on a list.

    Returns:
        ``[2, lists]`` float64: 1 minus the loss of the head that loses most, first at its
        worst-tenth quantile of places, then in the mean over places.
    """
    lost = (mass[-1] - mass).astype(np.float64)
    worst = np.quantile(lost, 1 - WORST, axis=2).max(axis=1)
    rated: Floats = 1 - np.stack([worst, lost.mean(axis=2).max(axis=1)])
    return rated


def hold(sharing: SharedForward, layer: int, indices: torch.Tensor) -> None:
    """Set ``indices`` as the selection of ``layer`` without running it."""
    sharing.layer, sharing.indices = layer, indices


def common_layers(first: Pattern, second: Pattern) -> int:
    """Return how many first layers are the same under two patterns."""
    letters = enumerate(zip(first.text, second.text, strict=True))
    return next((i for i, (one, other) in letters if one != other), len(first))
