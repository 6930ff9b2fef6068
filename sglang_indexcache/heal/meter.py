"""What a block of torch code takes: bytes alive, bytes moved, products; also on the meta device."""

from __future__ import annotations

import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


@dataclass
class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what happens meanwhile.

    Attributes:
        alive: bytes of all tensors that were made and are still there.
        peak: the most of them.
        moved: bytes that operations read and wrote.
        flops: of products, by dtype.
    """

    alive: int = 0
    peak: int = 0
    moved: int = 0
    flops: dict[torch.dtype, float] = field(default_factory=lambda: defaultdict(float))

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: set[int] = set()

    def restart(self) -> None:
        """Count anew what is moved and multiplied; the peak begins at what is alive."""
        self.peak, self.moved = self.alive, 0
        self.flops.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and take note of it."""
        found = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves(found) if isinstance(t, torch.Tensor)]
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self.moved += sum(t.numel() * t.itemsize for t in (*given, *tensors))
        packet = func.overloadpacket
        if packet in flop_registry:
            counted = flop_registry[packet](*args, **(kwargs or {}), out_val=found)
            self.flops[tensors[0].dtype] += counted
        elif "grouped_mm" in str(packet):  # each row meets the matrix of one expert
            self.flops[tensors[0].dtype] += 2 * given[0].numel() * tensors[0].shape[-1]
        theirs = {tensor.untyped_storage()._cdata for tensor in given}
        for tensor in tensors:
            if tensor.untyped_storage()._cdata not in theirs:  # else a view, or written in place
                self._see(tensor.untyped_storage())
        return found

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or not size:
            return
        self._known.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._drop, key, size).atexit = False

    def _drop(self, key: int, size: int) -> None:
        self._known.remove(key)
        self.alive -= size
