"""The observers of the CPU backend (``cpu/backend.py``): the drift shadow.

Lists name the positions of a request's tokens here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sglang_indexcache.serving.monitor.observer import Observer

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_indexcache.serving.monitor.shadow import Part


class CpuShadowProbe(Observer):
    """The drift shadow's view of a forward on a CPU: its lists and index keys."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def selected(
        self, layer: int, batch: ForwardBatch, lists: torch.Tensor | None, **own: Any
    ) -> None:
        """Let the shadow compare; see :meth:`Shadow.look`."""
        backend = self._backend

        def keys(part: Part, start: int, stop: int) -> torch.Tensor:
            slots = backend.batch.slots[part.request, start:stop]
            return backend.index_keys.load(layer, slots).float()

        def positions(part: Part) -> torch.Tensor:
            return torch.arange(max(part.sees))

        place = backend.active.position(layer)
        backend.active.shadow.look(place, lists, positions, keys=keys, **own)
