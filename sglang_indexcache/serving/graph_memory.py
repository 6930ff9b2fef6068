"""What the graphs of ``--indexcache-graphs`` take of a GPU's memory, kept free for them.

SGLang leaves 2 MB free for each request of its largest decode graph (``reserve_for_graph_mb``),
however many graphs it captures of a size, and gives the rest to the KV pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_indexcache.serving.settings import BACKEND_NAME, GRAPHS, Plan

logger = logging.getLogger(__name__)

_MB_A_REQUEST = 2
"""SGLang's own estimate for one graph of each size."""


def graph_reserve_mb(cfg: Any, plan: Plan) -> int:
    """MB to keep free on each GPU for the graphs beside SGLang's; for the doctor to print, too.

    Args:
        cfg: SGLang's resolving view of the server's arguments, once it has decided the batch sizes
            of its graphs (after ``handle_gpu_memory_settings``).
        plan: the server's. Of each batch size it has as many graphs more as it lists.

    Returns:
        0 without such graphs. An estimate by SGLang's own figure, not measured on a GPU.
    """
    if not plan.graphs or cfg.disaggregation_mode == "prefill":
        return 0
    return len(plan.graphs) * _MB_A_REQUEST * (cfg.cuda_graph_config.decode.max_bs or 0)


def keep_free(server_args: Any, previous: Callable[[Any], None]) -> None:
    """The resolution step that decides ``--mem-fraction-static``, unless the user fixed it."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    from sglang.srt.utils.common import get_device_memory_capacity

    cfg = resolving_view(server_args)
    is_fixed = cfg.mem_fraction_static is not None
    previous(server_args)
    plan = Plan.from_overrides(cfg.json_model_override_args)
    reserve = 0 if plan is None else graph_reserve_mb(cfg, plan)
    memory = get_device_memory_capacity(cfg.device) if reserve else None
    if memory is None:
        return
    if is_fixed:
        logger.warning(
            "IndexCache: --mem-fraction-static is given, so nothing is kept free for the graphs of "
            "%s, about %d MB.",
            GRAPHS.flag,
            reserve,
        )
        return
    fraction = round(cfg.mem_fraction_static - reserve / memory, 3)
    declare_resolution(server_args, BACKEND_NAME, mem_fraction_static=fraction)
    logger.info(
        "IndexCache: %d MB are kept free for the graphs of %s: --mem-fraction-static %s.",
        reserve,
        GRAPHS.flag,
        fraction,
    )
