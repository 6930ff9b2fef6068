"""Rows on their way through the layers of a frozen body."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from sglang_indexcache.heal.frozen import FrozenBody
from sglang_indexcache.heal.indexer import Rotation
from sglang_indexcache.heal.local import LocalForward, LocalSharing


@dataclass
class Passing:
    """Some rows, and how far they have come.

    Attributes:
        run: what their layers hand down.
        hidden: ``[B, T, hidden_size]``, what the next layer reads.
        rotation: of every layer.
    """

    run: LocalForward
    hidden: torch.Tensor
    rotation: Rotation

    def through(
        self,
        layer: Callable[[torch.Tensor, Rotation], torch.Tensor],
        device: torch.device,
        sharing: LocalSharing,
    ) -> None:
        """Run a layer that lies on ``device``."""
        self.run.move(device)
        cosine, sine = self.rotation
        self.rotation = cosine.to(device), sine.to(device)
        sharing.resume(self.run)
        self.hidden = layer(self.hidden.to(device), self.rotation)


def pass_through(body: FrozenBody, sharing: LocalSharing, rows: Sequence[Passing]) -> None:
    """Run all layers on all rows, with gradients if they are enabled; the bits are the same always.

    On one device, and from disk, a layer takes all rows before the next one does, so it is
    dequantised or read once. On several devices each takes a row through all of its layers while
    the next device has the row before: they work at once.
    """
    if pipelined(body, len(rows)):
        _as_a_pipeline(body, sharing, rows)
        return
    for number, device in enumerate(body.devices):
        layer = body.layer(number)
        for one in rows:
            one.through(layer, device, sharing)


def pipelined(body: FrozenBody, rows: int) -> bool:
    """Whether the devices work on different rows at once."""
    return rows > 1 and not body.from_disk and sum(map(bool, body.shares)) > 1


def _as_a_pipeline(body: FrozenBody, sharing: LocalSharing, rows: Sequence[Passing]) -> None:
    """A thread for each device: a GPU's work is asked for by a thread that may have to wait."""
    shares = [share for share in body.shares if share]
    queues: list[SimpleQueue[Passing | None]] = [SimpleQueue() for _ in (*shares, None)]
    training, threads = torch.is_grad_enabled(), torch.get_num_threads()

    def work(share: range, come: Iterable[Passing], gone: SimpleQueue[Passing | None]) -> None:
        torch.set_num_threads(threads)  # a new thread has its own
        try:
            with torch.set_grad_enabled(training):
                for one in come:
                    for number in share:
                        one.through(body.layer(number), body.devices[number], sharing)
                    gone.put(one)
        finally:
            gone.put(None)

    for one in (*rows, None):
        queues[0].put(one)
    with ThreadPoolExecutor(len(shares)) as pool:
        done = [
            pool.submit(work, share, iter(come.get, None), gone)
            for share, come, gone in zip(shares, queues[:-1], queues[1:], strict=True)
        ]
    for one_device in done:
        one_device.result()
