"""Loading of an adapter's indexers in place of the checkpoint's, on every rank.

The tensors are converted to the form in which the checkpoint stores its own (block-FP8 with scales,
or the same dtype) and pass through SGLang's loading of the model, after the checkpoint's weights.
So whatever SGLang fuses, shards, dequantises or packs, it treats them like the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_indexcache.errors import CheckpointError, SettingsError
from sglang_indexcache.serving import hooks
from sglang_indexcache.serving.adapters.folder import Adapter, indexer_layer
from sglang_indexcache.serving.options import ADAPTER
from sglang_indexcache.serving.plan import Plan
from sglang_indexcache.serving.process import published_plan

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

_LOADER = "sglang.srt.model_loader.loader.DefaultModelLoader"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_ADAPTED = "_indexcache_adapted"
"""Attribute of a model whose indexers were replaced while it was loaded."""


def install(plan: Plan) -> None:
    """Make this process load its model with the plan's adapter; do nothing if the plan has none.

    Later updates of weights are refused. Safe to call again.
    """
    if not plan.adapter:
        return
    hooks.after(f"{_LOADER}.load_weights_only", _bring_in)
    for_disk, for_group = "UpdateWeightFromDiskReqOutput", "UpdateWeightsFromDistributedReqOutput"
    for_tensor, for_ipc = "UpdateWeightsFromTensorReqOutput", "UpdateWeightsFromIPCReqOutput"
    hooks.around(f"{_UPDATER}.update_weights_from_disk", _refusing(for_disk))
    hooks.around(f"{_UPDATER}.update_weights_from_distributed", _refusing(for_group))
    hooks.around(f"{_UPDATER}.update_weights_from_tensor", _refusing(for_tensor))
    hooks.around(f"{_UPDATER}.update_weights_from_ipc", _refusing(for_ipc))


def _refusing(output: str) -> Callable[..., Any]:
    """Refuse an update of the weights: the adapter belongs to the checkpoint that was loaded."""

    def refuse(_original: Callable[..., Any], _manager: Any, _request: Any) -> Any:
        from sglang.srt.managers import io_struct

        return getattr(io_struct, output)(
            success=False,
            message="this server has an adapter, which belongs to the weights that it was started "
            f"with. To update weights, start one without {ADAPTER.flag}, from a checkpoint that "
            "indexcache heal merge wrote.",
        )

    return refuse


def _bring_in(_result: None, model: Module, *_args: Any, **_named: Any) -> None:
    plan = published_plan()
    if plan is None or not plan.adapter:
        return
    names = (name for name, _ in model.named_modules())
    if any(indexer_layer(f"{name}.any") is not None for name in names):  # no draft model
        model.load_weights(indexers(plan).items())  # type: ignore[operator]
    setattr(model, _ADAPTED, True)


def check_in_effect(runner: Any, plan: Plan) -> None:
    """Check that the adapter was loaded into the model.

    Raises:
        SettingsError: the weights were loaded by another path than the hooked one.
    """
    if plan.adapter and not getattr(runner.model, _ADAPTED, False):
        raise SettingsError(
            f"--load-format {runner.load_config.load_format} loads weights in a way of its own, in "
            "which the adapter's would be left out. Use --load-format auto."
        )


def indexers(plan: Plan) -> Mapping[str, torch.Tensor]:
    """Return the adapter's weights by name, in the form in which the checkpoint stores its own.

    If the checkpoint's weights are dequantised while they load (on a CPU), so are the adapter's.

    Raises:
        CheckpointError: the adapter has changed since the server was started.
    """
    from sglang.srt.runtime_context import get_model

    from sglang_indexcache.serving.adapters.weights import like_stored
    from sglang_indexcache.serving.cpu import fp8

    adapter, base = Adapter.read(Path(plan.adapter)), Path(get_model().model_path)
    if adapter.digest != plan.adapter_digest:
        raise CheckpointError(
            f"the adapter {plan.adapter} was replaced since this server was started. Start the "
            "server again, or put the adapter that it was started with back."
        )
    tensors = like_stored(base, adapter.tensors())
    size = fp8.blocks()
    return tensors if size is None else dict(fp8.plain(tensors.items(), size))
