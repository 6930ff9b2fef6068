"""IndexCache: let most DSA layers reuse the top-k indices of an earlier layer.

DeepSeek Sparse Attention runs a small indexer in every layer. A *pattern* such as ``FSSS...`` says
which layers keep their indexer (F) and which reuse the indices of the nearest earlier F layer (S).

On a transformers model, :func:`share` skips the indexers. On a server SGLang skips them itself,
because ``serving/plan.py`` (``Plan.hf_overrides``) rewrites the model's config before the model is
built. This package decides the pattern, checks it, and carries the indices where SGLang does not
(``serving/index_buffer.py``: live mode, hybrid models, two-batch overlap).

To understand the method, read in this order: ``pattern.py`` (which layer reuses which), ``hf.py``
(the method on a model in Python), ``serving/plan.py`` (what a server is told), and
``serving/cpu/backend.py`` (a whole backend).

The public names are loaded when they are first used, so importing this package costs nothing:

- :class:`Pattern`: an F/S string, checked; :class:`Library`: the patterns that ship with the
  package; :class:`Checkpoint`: what a model's config says about its indexers.
- :func:`share`: run a transformers model under a pattern. It needs torch and transformers.
- :func:`distillation_loss`: train an indexer for the layers that it serves, and the paper's
  L_multi, :func:`multi_layer_loss`. They take :class:`IndexInputs`, :class:`AttentionInputs`, a
  :class:`Layout` and what :func:`select_top_k` selects, and need torch.
- :class:`Client`: talk to a server that runs IndexCache.
- :class:`IndexCacheError`: the base of every error about bad input.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.5.23.post1"
"""Version of SGLang that this release extends, and the number of our release for it."""

_MODULES = {
    "AttentionInputs": "lab.heal.losses",
    "Checkpoint": "checkpoint",
    "Client": "lab.client.http",
    "IndexCacheError": "errors",
    "IndexInputs": "lab.heal.losses",
    "Layout": "lab.heal.packing",
    "Library": "library.resolve",
    "Pattern": "pattern",
    "distillation_loss": "lab.heal.losses",
    "multi_layer_loss": "lab.heal.losses",
    "select_top_k": "lab.heal.losses",
    "share": "hf",
}
"""Public names and the modules that define them; the imports below show them to type checkers."""

__all__ = tuple(_MODULES)

if TYPE_CHECKING:
    from sglang_indexcache.checkpoint import Checkpoint as Checkpoint
    from sglang_indexcache.errors import IndexCacheError as IndexCacheError
    from sglang_indexcache.hf import share as share
    from sglang_indexcache.lab.client.http import Client as Client
    from sglang_indexcache.lab.heal.losses import AttentionInputs as AttentionInputs
    from sglang_indexcache.lab.heal.losses import IndexInputs as IndexInputs
    from sglang_indexcache.lab.heal.losses import distillation_loss as distillation_loss
    from sglang_indexcache.lab.heal.losses import multi_layer_loss as multi_layer_loss
    from sglang_indexcache.lab.heal.losses import select_top_k as select_top_k
    from sglang_indexcache.lab.heal.packing import Layout as Layout
    from sglang_indexcache.library.resolve import Library as Library
    from sglang_indexcache.pattern import Pattern as Pattern
else:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
