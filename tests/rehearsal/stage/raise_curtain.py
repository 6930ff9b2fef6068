"""Sets the stage when imported: ``torch.cuda``, the ways into compiled code, the references."""

import time

from tests.rehearsal.stage import collectives, deep_ep, graphs, launches, mutants, transfer

collectives.install()
deep_ep.install()
transfer.install()
launches.install()  # before any module of SGLang imports one of them by name

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
launches.stand_in()
collectives.stand_in()
graphs.stand_in()
mutants.await_plugin()


def _be_modest() -> None:
    """Leave cores and memory to others.

    SGLang's schedulers spin while idle, and HiCache wants 10 GB that nobody uses.
    """
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.pool_host import base

    Scheduler.maybe_sleep_on_idle = lambda _: time.sleep(0.02)  # type: ignore[method-assign]
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


_be_modest()
