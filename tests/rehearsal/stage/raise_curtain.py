"""Sets the stage when imported: ``torch.cuda``, the ways into compiled code, the references."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.rehearsal.stage import card, collectives, deep_ep, graphs, launches, mutants, transfer

collectives.install()
deep_ep.install()
transfer.install()
launches.install()  # before any module of SGLang imports one of them by name

from sglang_indexcache.kernels import dispatch, routes  # noqa: E402
from sglang_indexcache.serving import row_split  # noqa: E402
from sglang_indexcache.serving.cuda import choice  # noqa: E402
from tests.rehearsal.stage.kernels import (  # noqa: E402, F401
    attention,
    dense,
    exchange,
    experts,
    indexer,
    quantized,
    rotary,
    speculative,
)

row_split.ON_GPU = row_split.GatherCost(call=0, entries_a_pair=1000)  # splits short prompts, too
choice.ENGINE_TOPK.add(128)  # the references take the small checkpoints' lists too
choice.RECORDED_TOPK.add(128)
routes.TABLE = Path(__file__).with_name("measured.json")
launches.stand_in()
collectives.stand_in()
graphs.stand_in()
mutants.await_plugin()


class _Ours(dispatch.Implementation):
    """Our kernels, which need a card: references stand for them, launched as kernels are."""

    def load(self, op: dispatch.OpName) -> Callable[..., Any]:
        kernel = dispatch.named("reference").load(op)
        return lambda *args, **kwargs: card.mark(graphs.launch(kernel, *args, **kwargs))


dispatch.IMPLEMENTATIONS = (_Ours("cuda"), dispatch.named("reference"))


def _be_modest() -> None:
    """Leave cores and memory to others.

    SGLang's schedulers spin while idle, and HiCache wants 10 GB that nobody uses.
    """
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.pool_host import base

    Scheduler.maybe_sleep_on_idle = lambda _: time.sleep(0.02)  # type: ignore[method-assign]
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


_be_modest()
