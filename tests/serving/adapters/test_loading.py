"""Way of an adapter into SGLang: refused before weights load, or loaded as weights are there.

SGLang multiplies no block-FP8 weights without a GPU or AMX, so what becomes of a quantised indexer
there is tested up to SGLang's own loading of it. That servers answer with the adapter, over a
block-FP8 checkpoint that the CPU platform dequantises too, is in ``tests/e2e/test_adapter.py``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sglang_indexcache.checkpoint import read_config
from sglang_indexcache.errors import Findings, IndexCacheError, SettingsError
from sglang_indexcache.lab.demo import shipped_checkpoint
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.adapters import loading as served
from sglang_indexcache.serving.adapters.folder import Adapter, indexer_layer, indexer_shapes
from sglang_indexcache.serving.adapters.weights import SCALES, dequantised, to_block_fp8
from sglang_indexcache.serving.adapters.writing import write_adapter
from sglang_indexcache.serving.cpu import fp8
from sglang_indexcache.serving.plan import Plan
from sglang_indexcache.serving.resolve import PatternChoice
from tests.serving.plans import plan
from tests.serving.test_plugin import hf_config, resolve

CHECKPOINT = shipped_checkpoint()
PATTERN = Pattern.uniform(12, 4)


@pytest.fixture(autouse=True, scope="module")
def plugins() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture
def adapter(tmp_path: Path) -> Adapter:
    weights = load_file(CHECKPOINT / "model.safetensors")
    tensors = {
        name: 2 * tensor
        for name, tensor in weights.items()
        if indexer_layer(name) in PATTERN.full_layers
    }
    return write_adapter(
        tmp_path / "adapter", pattern=PATTERN, checkpoint=CHECKPOINT, tensors=tensors, record={}
    )


# -- before weights load -----------------------------------------------------------------------


def planned(*arguments: str, model: Path = CHECKPOINT) -> Plan:
    resolved = Plan.from_hf_config(hf_config(resolve(model, *arguments)))
    assert resolved is not None
    return resolved


@pytest.mark.parametrize("more", [[], ["--indexcache-pattern", "uniform:1/4"]])
def test_the_pattern_is_the_adapters(adapter: Adapter, more: list[str]) -> None:
    resolved = planned("--indexcache-adapter", str(adapter.folder), *more)
    assert resolved.pattern == PATTERN
    assert (resolved.adapter, resolved.adapter_digest) == (str(adapter.folder), adapter.digest)
    assert f"indexers of the adapter {adapter.folder}" in resolved.describe()


def _change_base(folder: Path) -> list[str]:
    base = folder.parent / "base"
    shutil.copytree(CHECKPOINT, base)
    config = read_config(base)
    (base / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    return ["--model-path", str(base)]


def _empty(folder: Path) -> list[str]:
    shutil.rmtree(folder)
    folder.mkdir()
    return []


# What else is wrong with an adapter's files is one error in test_folder.py.
REFUSED: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "another base": (_change_base, "was trained on tiny-dsa .* is another checkpoint"),
    "another pattern": (
        lambda _: ["--indexcache-pattern", "uniform:1/2"],
        "was trained for the pattern FSSSFSSSFSSS, and FSFSFSFSFSFS was asked for",
    ),
    "SGLang's way to say another": (
        lambda _: ["--json-model-override-args", '{"index_topk_pattern": "FSFSFSFSFSFS"}'],
        "was trained for the pattern",
    ),
    "no adapter": (_empty, "is not an adapter: cannot read"),
    "live mode": (
        lambda _: ["--indexcache-mode", "live"],
        "live mode does not work with --indexcache-adapter, whose indexers are trained for one",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_one_clear_error(adapter: Adapter, fault: str) -> None:
    change, says = REFUSED[fault]
    more = change(adapter.folder)
    with pytest.raises(IndexCacheError, match=says):
        planned("--indexcache-adapter", str(adapter.folder), *more)


def test_a_name_of_the_hub_cannot_be_compared(adapter: Adapter) -> None:
    findings = Findings()
    PatternChoice.from_adapter(adapter.folder, Path("some-one/some-model"), None, findings)
    with pytest.raises(SettingsError, match="needs --model-path to be a folder"):
        findings.report()


def test_other_weights_have_other_kv(adapter: Adapter) -> None:
    plans = [plan("FFFF"), *(plan("FFFF", adapter="a", adapter_digest=d * 64) for d in "ab")]
    full, shared = Pattern("FFFF"), Pattern("FSFS")
    assert plans[0].kv_namespace(full) is None
    assert len({p.kv_namespace(pattern) for p in plans for pattern in (full, shared)}) == 6
    assert len({p.terms for p in plans}) == 3


# -- loading -----------------------------------------------------------------------------------

SHAPE = {"hidden_size": 256, "q_lora_rank": 384, "index_n_heads": 4, "index_head_dim": 128}
HEADS, WIDTH = SHAPE["index_n_heads"], SHAPE["index_head_dim"]
QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}


def model(*, fused: bool) -> nn.Module:
    """Two layers' indexers of SGLang's own quantised linears, with SGLang's own weight loading."""
    from sglang.srt.layers.linear import ReplicatedLinear
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.models.deepseek_common.deepseek_weight_loader import (
        DeepseekV2WeightLoaderMixin,
    )

    quantised = Fp8Config.from_config(QUANTIZATION)

    def linear(inputs: int, outputs: int, config: Any = None) -> nn.Module:
        return ReplicatedLinear(
            inputs, outputs, bias=False, quant_config=config, params_dtype=torch.bfloat16
        )

    class Model(DeepseekV2WeightLoaderMixin, nn.Module):
        quant_config = quantised
        num_fused_shared_experts = 0
        pp_group = SimpleNamespace(is_last_rank=True)
        config = SimpleNamespace(
            n_routed_experts=1,
            q_lora_rank=SHAPE["q_lora_rank"],
            num_hidden_layers=2,
            architectures=["GlmMoeDsaForCausalLM"],
        )

        def load_weights(self, weights: Any) -> None:
            self.do_load_weights(weights)

    def indexer() -> nn.Module:
        module = nn.Module()
        module.wq_b = linear(SHAPE["q_lora_rank"], HEADS * WIDTH, quantised)
        if fused:  # as on NVIDIA GPUs for GLM-5
            module.wk_weights_proj = linear(SHAPE["hidden_size"], WIDTH + HEADS)
        else:
            module.wk = linear(SHAPE["hidden_size"], WIDTH, quantised)
            module.weights_proj = linear(SHAPE["hidden_size"], HEADS)
        module.k_norm = nn.LayerNorm(WIDTH)
        return module

    outer, inner = Model(), nn.Module()
    layers = [nn.Module() for _ in range(2)]
    for layer in layers:
        layer.self_attn = nn.Module()
        layer.self_attn.indexer = indexer()
    inner.layers, inner.start_layer, inner.end_layer = nn.ModuleList(layers), 0, 2
    outer.model = inner
    for parameter in outer.parameters():
        parameter.data = parameter.data.float().fill_(-1).to(parameter.dtype)
    return outer


def weights(layer: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"model.layers.{layer}.self_attn.indexer.{name}": torch.randn(shape, generator=generator)
        for name, shape in indexer_shapes(SHAPE).items()
    }


def as_released(plain: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, tensor in plain.items():
        if name.endswith(("wq_b.weight", "wk.weight")):
            tensors[name], tensors[name + SCALES] = to_block_fp8(tensor)
        else:
            tensors[name] = tensor if "norm" in name else tensor.bfloat16()
    return tensors


@pytest.fixture
def fp8_base(tmp_path: Path) -> Path:
    folder = tmp_path / "fp8"
    folder.mkdir()
    config = SHAPE | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "num_hidden_layers": 2,
        "index_topk": 8,
        "quantization_config": QUANTIZATION,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        as_released(weights(0, 1) | weights(1, 2)),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


@pytest.fixture
def fp8_plan(fp8_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    trained = write_adapter(
        tmp_path / "fp8-adapter",
        pattern=Pattern("FS"),
        checkpoint=fp8_base,
        tensors=weights(0, 9),
        record={},
    )
    findings = Findings()
    PatternChoice.from_adapter(trained.folder, fp8_base, None, findings)
    findings.report()
    result = plan("FS", adapter=str(trained.folder), adapter_digest=trained.digest)
    monkeypatch.setattr(served, "published_plan", lambda: result)
    bag = SimpleNamespace(model_path=str(fp8_base), json_model_override_args="{}")
    monkeypatch.setattr("sglang.srt.runtime_context.get_model", lambda: bag)
    return result


def load(into: nn.Module, base: Path) -> None:
    """Load as SGLang does, with the hook of a server that has an adapter."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    tensors = load_file(base / "model.safetensors")
    DefaultModelLoader.load_weights_only(into, iter(tensors.items()), torch.device("cpu"))
    DefaultModelLoader.postprocess_weights(into, torch.device("cpu"))


def equal_weights(first: nn.Module, second: nn.Module) -> bool:
    theirs = dict(second.named_parameters())
    return all(
        torch.equal(p.view(torch.uint8), theirs[name].view(torch.uint8))
        for name, p in first.named_parameters()
    )


@pytest.mark.parametrize("fused", [False, True])
def test_it_is_quantised_on_loading_like_the_checkpoint(
    fp8_base: Path, fp8_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    """The same bits as from a checkpoint with these weights; the layer without stays as it is."""
    merged = tmp_path / "merged"
    shutil.copytree(fp8_base, merged)
    content = as_released(weights(0, 9) | weights(1, 2))
    save_file(content, merged / "model.safetensors", metadata={"format": "pt"})
    plain, expected, loaded = model(fused=fused), model(fused=fused), model(fused=fused)
    with monkeypatch.context() as without:  # the hook of the test before stays
        without.setattr(served, "published_plan", lambda: None)
        load(plain, fp8_base)
        load(expected, merged)
    served.install(fp8_plan)
    load(loaded, fp8_base)
    assert loaded.model.layers[0].self_attn.indexer.wq_b.weight.dtype == torch.float8_e4m3fn
    assert equal_weights(loaded, expected)
    assert not equal_weights(loaded, plain)
    served.check_in_effect(SimpleNamespace(model=loaded), fp8_plan)


def test_where_weights_are_dequantised_its_are_too(
    fp8_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = served.indexers(fp8_plan)
    blocks = QUANTIZATION["weight_block_size"]
    monkeypatch.setattr(fp8, "blocks", lambda: blocks)
    plain = served.indexers(fp8_plan)
    assert plain.keys() == {name for name in tensors if not name.endswith(SCALES)}
    for name, tensor in plain.items():
        scales = tensors.get(name + SCALES)
        expected = tensors[name] if scales is None else dequantised(tensors[name], scales, blocks)
        assert torch.equal(tensor, expected)


def test_weights_that_came_another_way(fp8_plan: Plan) -> None:
    runner = SimpleNamespace(
        model=model(fused=False), load_config=SimpleNamespace(load_format="sharded_state")
    )
    with pytest.raises(SettingsError, match="--load-format sharded_state loads weights in a way"):
        served.check_in_effect(runner, fp8_plan)


@pytest.mark.parametrize("route", ["disk", "distributed", "tensor", "ipc"])
def test_an_update_of_weights_is_refused(fp8_plan: Plan, route: str) -> None:
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )

    served.install(fp8_plan)
    update = getattr(SchedulerWeightUpdaterManager, f"update_weights_from_{route}")
    answer = update(SimpleNamespace(), SimpleNamespace())
    assert not answer.success
    assert "start one without --indexcache-adapter" in answer.message


def test_an_adapter_that_was_replaced_under_a_server(fp8_base: Path, fp8_plan: Plan) -> None:
    write_adapter(
        Path(fp8_plan.adapter),
        pattern=Pattern("FS"),
        checkpoint=fp8_base,
        tensors=weights(0, 10),
        record={},
    )
    with pytest.raises(IndexCacheError, match="was replaced since this server was started"):
        served.indexers(fp8_plan)
