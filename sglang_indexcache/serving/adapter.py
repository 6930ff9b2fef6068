"""An adapter's indexers in place of the checkpoint's, on every rank.

They are brought into the form in which the checkpoint stores its own (block-FP8 with scales, or
the same dtype) and then go through SGLang's own loading of the model, behind the checkpoint's
weights and before SGLang makes of them what its kernels want. So whatever SGLang fuses, shards,
dequantises or packs there, it does with them as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_indexcache.adapter import Adapter, indexer_layer
from sglang_indexcache.errors import CheckpointError, SettingsError
from sglang_indexcache.serving import hooks
from sglang_indexcache.serving.active import published_plan
from sglang_indexcache.serving.settings import ADAPTER, MODE, Plan

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

IN_EFFECT = "adapter"
"""The pattern value that stands for the adapter's pattern and indexers on a live server."""

_LOADER = "sglang.srt.model_loader.loader.DefaultModelLoader"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_ADAPTED = "_indexcache_adapted"
"""Attribute of a model whose indexers were replaced while it was loaded."""


def install(plan: Plan) -> None:
    """Have this process's model loaded with the plan's adapter; safe to call again."""
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
    """An update of weights that answers with SGLang's message ``output``: no.

    It would replace the adapter's indexers, or leave them on a model that is not their base.
    """

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
    if _indexers(model):  # a draft model's layers have other names
        model.load_weights(indexers(plan, adapted=True).items())  # type: ignore[operator]
    setattr(model, _ADAPTED, True)


def check_in_effect(runner: Any, plan: Plan) -> None:
    """Make sure that the adapter is in the model, and that live mode can take it out again.

    Raises:
        SettingsError: the weights came another way than the one that was hooked, or SGLang
            changed them in a way that it cannot undo.
    """
    if not plan.adapter:
        return
    if not getattr(runner.model, _ADAPTED, False):
        raise SettingsError(
            f"--load-format {runner.load_config.load_format} loads weights in a way of its own, in "
            "which the adapter's would be left out. Use --load-format auto."
        )
    changed = any(
        getattr(parameter, "format_ue8m0", False)
        for indexer in _indexers(runner.model)
        for parameter in indexer.parameters()
    )
    if plan.mode == "live" and changed:
        raise SettingsError(
            "in live mode an adapter cannot be taken out again on this GPU, where SGLang changes "
            f"the scales of FP8 weights for good. Use {MODE.flag} static, or --fp8-gemm-backend "
            "triton."
        )


def indexers(plan: Plan, *, adapted: bool) -> Mapping[str, torch.Tensor]:
    """The weights of the adapter's layers by name, as the checkpoint stores such weights.

    Args:
        adapted: the adapter's weights, or else the checkpoint's own. Where the checkpoint's are
            dequantised while they load (on a CPU), so are these.

    Raises:
        CheckpointError: the adapter is not the one that the server was started with.
    """
    from sglang.srt.runtime_context import get_model

    from sglang_indexcache.serving.cpu import fp8
    from sglang_indexcache.stored import like_stored, read_stored

    adapter, base = Adapter.read(Path(plan.adapter)), Path(get_model().model_path)
    if adapter.digest != plan.adapter_digest:
        raise CheckpointError(
            f"the adapter {plan.adapter} was replaced since this server was started. Start the "
            "server again, or put the adapter that it was started with back."
        )
    found = like_stored(base, adapter.tensors()) if adapted else read_stored(base, adapter.names())
    size = fp8.blocks()
    return found if size is None else dict(fp8.plain(found.items(), size))


def put(model: Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Replace indexers in a model that serves, as SGLang updates weights from a disk.

    Source: ``WeightUpdater.update_weights_from_disk``.

    Args:
        model: SGLang's, between two batches.
    """
    import torch
    from sglang.srt.model_loader.loader import DefaultModelLoader

    device = next(model.parameters()).device
    for indexer in _indexers(model):
        DefaultModelLoader.restore_weights_before_loading(indexer, device)
    model.load_weights(weights.items())  # type: ignore[operator]
    for indexer in _indexers(model):
        DefaultModelLoader.postprocess_weights(indexer, device)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _indexers(model: Module) -> list[Module]:
    """Those of the model's layers that this process has."""
    return [
        module for name, module in model.named_modules() if indexer_layer(f"{name}.any") is not None
    ]
