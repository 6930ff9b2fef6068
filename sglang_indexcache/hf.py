"""The method without an engine: ``with share(model, pattern):`` on a transformers DSA model.

Every attention layer of such a model asks its indexer which tokens to attend to. Under
:func:`share` an F layer's answer is held, and the S layers after it get that answer without
running theirs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import MethodType
from typing import TYPE_CHECKING, Any

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import CheckpointError, PatternError, StaleIndexError
from sglang_indexcache.library.resolve import Library
from sglang_indexcache.models import BY_ARCHITECTURE
from sglang_indexcache.pattern import Pattern

if TYPE_CHECKING:
    import torch

_KEY_UPDATE = "update_indexer"
"""Name of the method with which a cache layer stores index keys."""


@dataclass
class SharedForward:
    """State of a model under :func:`share`.

    Attributes:
        layer: the F layer that chose ``indices``, by its place in the pattern; None before any.
        indices: what it selected for each query: ``[batch, queries, k]`` int32 positions.
    """

    pattern: Pattern
    layer: int | None = None
    indices: torch.Tensor | None = None


@contextmanager
def share(model: Any, pattern: Pattern | str) -> Iterator[SharedForward]:
    """Run ``model`` under ``pattern`` inside this context, and restore it afterwards.

    Inside another ``share`` of the same model, the inner pattern is the one in effect. A cache
    that was filled under a pattern has no index keys for the S layers: running an S layer's indexer
    on that cache, even after the context has ended, raises :class:`PatternError`.

    Args:
        model: a transformers model with DSA (GLM-5, DeepSeek-V3.2, A.X-K2, HY-V4, ...). One that
            this package does not know is judged by its modules, with a warning.
        pattern: a pattern, or any form that :meth:`Library.resolve` takes, such as ``"1/4"``.

    Raises:
        CheckpointError: the model has no indexers, or, in its first forward, indexers that
            do not answer as :class:`SharedForward` expects.
        PatternError, LibraryError: the pattern does not fit the model, or is unknown.
        StaleIndexError: a forward runs the layers out of order (gradient checkpointing).
    """
    if not isinstance(pattern, (Pattern, str)):
        raise PatternError(f"a pattern is text such as '1/4' or 'FSSS', got {pattern!r}")
    if not hasattr(model, "modules"):
        raise CheckpointError(
            f"a model is wanted that transformers has loaded, got {model!r}. Load it first: "
            "AutoModelForCausalLM.from_pretrained(...)"
        )
    checkpoint, attentions = _checkpoint(model)
    if isinstance(pattern, str):
        pattern = Library.default().resolve(pattern, checkpoint).pattern
    pattern.check_checkpoint(checkpoint.own)
    sharing = SharedForward(pattern)
    with ExitStack() as stack:
        for number, attention in enumerate(attentions):
            if (indexer := attention.indexer) is not None:  # a trained S layer has no indexer
                stack.callback(_restore, indexer, vars(indexer).get("forward"))
                indexer.forward = _switch(indexer, number, sharing)
        yield sharing


def _switch(indexer: Any, number: int, sharing: SharedForward) -> Callable[..., torch.Tensor]:
    """Return a replacement for an indexer's forward, which runs the original or shares indices."""
    # Inside another share(), forward is the outer replacement; its .select is the original.
    select = getattr(indexer.forward, "select", indexer.forward)
    source = sharing.pattern.source_of(number)

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        if source == number:
            indices: torch.Tensor = select(*args, **kwargs)
            _check_indices(indices, indexer)
            sharing.indices, sharing.layer = indices, number
            return indices
        if sharing.indices is None or sharing.layer != source:
            raise StaleIndexError(
                f"layer {number} needs the indices of layer {source}, but layer {sharing.layer} "
                "chose last: the layers run out of order. Turn gradient checkpointing off."
            )
        caches = (value for value in (*args, *kwargs.values()) if hasattr(value, "layers"))
        if (cache := next(caches, None)) is not None:
            cache_layer = cache.layers[indexer.layer_idx]
            if hasattr(cache_layer, _KEY_UPDATE):
                setattr(cache_layer, _KEY_UPDATE, MethodType(_refuse_update, cache_layer))
        hidden = args[0] if args else kwargs["hidden_states"]
        return sharing.indices.to(hidden.device)  # layers may be on different devices

    forward.select = select  # type: ignore[attr-defined]
    return forward


def _check_indices(indices: Any, indexer: Any) -> None:
    """Refuse an indexer that does not return one list of positions for each query."""
    if getattr(indices, "ndim", 0) != 3 or indices.is_floating_point():
        raise CheckpointError(
            f"{type(indexer).__name__} does not answer with one list of positions for each query "
            "([batch, queries, k] integers), so its answer cannot be handed to other layers. Only "
            "indexers of DeepSeek Sparse Attention can be shared."
        )


def _restore(indexer: Any, forward: Any) -> None:
    if forward is None:
        del indexer.forward  # the method of the class is visible again
    else:
        indexer.forward = forward


def _refuse_update(cache_layer: Any, keys: torch.Tensor) -> Any:
    """Replace a cache's key update, and refuse to append where earlier keys are missing."""
    if cache_layer.get_seq_length() > keys.shape[-2]:
        raise PatternError(
            "an indexer runs on a cache that lacks its keys: its layer was S while the cache was "
            "filled. Start with an empty cache, or keep one pattern until the generation ends."
        )
    delattr(cache_layer, _KEY_UPDATE)  # the cache was emptied, so no keys are missing
    return getattr(cache_layer, _KEY_UPDATE)(keys)


def _checkpoint(model: Any) -> tuple[Checkpoint, list[Any]]:
    """Return the model's checkpoint facts, and its attention modules in the order of a pattern."""
    attentions = [module for module in model.modules() if hasattr(module, "indexer")]
    name = type(model).__name__
    config = model.config.to_dict()
    config["architectures"] = config.get("architectures") or [name]  # None if not yet saved
    if all(attention.indexer is None for attention in attentions):
        raise CheckpointError(
            f"this {name} is a model without a lightning indexer, so there is nothing to share. "
            "IndexCache is for DeepSeek Sparse Attention models (DeepSeek-V3.2, GLM-5, ...)."
        )
    checkpoint = Checkpoint.from_config(config, f"this {name}")
    if checkpoint.architecture not in BY_ARCHITECTURE:
        warnings.warn(
            f"this package does not know {checkpoint.architecture}: the {len(attentions)} layers "
            "that can have an indexer are taken for the layers of a pattern, in their order",
            stacklevel=4,
        )
        types = ["shared" if module.indexer is None else "full" for module in attentions]
        pattern, layers = Pattern.from_indexer_types(types), tuple(range(len(attentions)))
        checkpoint = replace(checkpoint, own=pattern, layer_ids=layers)
    pattern = checkpoint.own
    if len(attentions) != len(pattern) or any(
        attentions[i].indexer is None for i in pattern.full_layers
    ):
        raise CheckpointError(f"this {name} lacks indexers that its config names")
    return checkpoint, attentions
