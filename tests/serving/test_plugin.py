"""The resolution of real command lines by SGLang's own pipeline, for every DSA architecture."""

import json
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_indexcache.errors import Findings, IndexCacheError, SettingsError
from sglang_indexcache.kernels.dispatch import ROUTED
from sglang_indexcache.models import FAMILIES
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.options import OPTIONS
from sglang_indexcache.serving.plan import Plan

torch = pytest.importorskip("torch")
if torch.accelerator.is_available():
    pytest.skip("resolution is tested on the CPU platform", allow_module_level=True)

BASE = {
    "num_hidden_layers": 8,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "index_topk": 64,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "GlmMoeDsaForCausalLM": {"model_type": "glm_moe_dsa", "indexer_rope_interleave": True},
    "DeepseekV32ForCausalLM": {"model_type": "deepseek_v32"},
    "DeepseekV3ForCausalLM": {"model_type": "deepseek_v3"},
    "HYV4ForCausalLM": {"model_type": "hy_v4", "indexer_types": ["full"] * 8},
    "LongcatFlashForCausalLM": {
        "model_type": "longcat_flash",
        "num_layers": 4,
        "num_hidden_layers": 4,
        "ffn_hidden_size": 512,
        "expert_ffn_hidden_size": 128,
        "zero_expert_num": 0,
        "moe_topk": 2,
    },
}


@pytest.fixture(autouse=True, scope="module")
def plugins() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Path]:
    """Return a maker of folders with nothing but a config.json."""

    def make(architecture: str = "GlmMoeDsaForCausalLM", **fields: Any) -> Path:
        config = {**BASE, "architectures": [architecture], **MODELS.get(architecture, {}), **fields}
        folder = tmp_path / architecture
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


def resolve(folder: Path, *arguments: str, backend: str | None = "indexcache") -> Any:
    """Resolve a command line as the launcher does; returns ServerArgs."""
    from sglang.srt.server_args import prepare_server_args

    from sglang_indexcache.serving.plugin import FOUND

    command = ["--model-path", str(folder), "--log-level", "info", *arguments]
    if backend:
        command += ["--attention-backend", backend]
    server_args = prepare_server_args(command)
    findings = Findings()
    setattr(server_args, FOUND, findings.each)
    try:
        server_args.resolve_once()
    finally:  # what SGLang itself cannot resolve is of no interest then
        findings.report()
    return server_args


def hf_config(server_args: Any) -> Any:
    """Return the HF config that a worker builds its model from."""
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig.from_server_args(server_args).hf_config


def built_pattern(server_args: Any, layers: int = 8) -> str:
    """Return what SGLang's own policy function makes of the config."""
    from sglang.srt.configs.model_config import dsa_layer_skips_topk

    config = hf_config(server_args)
    return "".join("S" if dsa_layer_skips_topk(config, i) else "F" for i in range(layers))


OVERRIDES = {
    "index_topk_pattern": "FSSFSFSS",
    "indexer_types": Pattern("FSSFSFSS").to_indexer_types(),
    "index_topk_freq": 4,  # SGLang ignores it silently where the config fills ``indexer_types``
}
WAYS = {
    name: ["--json-model-override-args", json.dumps({name: v})] for name, v in OVERRIDES.items()
}
WAYS["flag"] = ["--indexcache-pattern", "FSSFSFSS"]


@pytest.mark.parametrize("source", WAYS)
@pytest.mark.parametrize("architecture", MODELS)
def test_pattern_reaches_a_worker_of_every_architecture(
    model: Callable[..., Path], architecture: str, source: str
) -> None:
    worker = pickle.loads(pickle.dumps(resolve(model(architecture), *WAYS[source])))
    assert built_pattern(worker) == ("FFSSSFSS" if source == "index_topk_freq" else "FSSFSFSS")


def test_names_are_checked_in_front_of_a_server_alone(
    model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes SGLang's tokenizer manager, which an examination has no use for."""
    from sglang.srt.managers.multi_tokenizer_mixin import TokenizerWorker
    from sglang.srt.server_args import prepare_server_args

    from sglang_indexcache.serving import http_checks

    installs: list[str] = []
    monkeypatch.setattr(http_checks, "install", lambda: installs.append("asked"))
    folder = model()
    resolve(folder)
    assert installs == []
    command = ["--model-path", str(folder), "--attention-backend", "indexcache"]
    server_args = prepare_server_args(command)
    server_args.resolve_once()
    assert installs == ["asked"]
    carried = pickle.loads(pickle.dumps(server_args))  # as tokenizer processes get it
    assert carried.get_tokenizer_worker_class() is TokenizerWorker
    assert installs == ["asked"] * 2


def test_a_config_that_sglang_would_die_of_is_refused_at_the_start(
    model: Callable[..., Path],
) -> None:
    with pytest.raises(IndexCacheError, match="index_topk is 0 and must be a whole number"):
        resolve(model(index_topk=0))


def test_upstream_still_has_the_bug_that_this_mends(model: Callable[..., Path]) -> None:
    """Upstream honours the override, and our warning can go, once this fails."""
    from sglang.srt.configs.model_config import ModelConfig, dsa_layer_skips_topk

    config = ModelConfig(
        str(model()), model_override_args=json.dumps({"index_topk_freq": 4})
    ).hf_config
    assert not any(dsa_layer_skips_topk(config, i) for i in range(8))


def test_hybrid_model_by_its_real_config_class(tmp_path: Path) -> None:
    """GLM-5-Next keeps its layers in a text config and has indexers in every fourth one."""
    from sglang.srt.configs.model_config import dsa_layer_skips_topk
    from sglang.srt.utils.hf_transformers.config import get_config

    from sglang_indexcache.checkpoint import Checkpoint
    from sglang_indexcache.serving.options import collect
    from sglang_indexcache.serving.resolve import make_plan

    architecture = "Glm5NextForConditionalGeneration"
    kda = [i for i in range(12) if i % 4 != 3]
    linear = {"kda_layers": kda}
    text = {**BASE, "qk_rope_head_dim": 0, "num_hidden_layers": 12, "linear_attn_config": linear}
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"architectures": [architecture], "model_type": "glm5_next", "text_config": text}
        )
    )
    config = get_config(str(tmp_path), trust_remote_code=False)
    checkpoint = Checkpoint.from_config(config)
    assert checkpoint.layer_ids == (3, 7, 11)
    request = collect({"indexcache_pattern": "FSS"})
    plan = make_plan(request, checkpoint, {}, "", Findings())
    changed = get_config(
        str(tmp_path),
        trust_remote_code=False,
        model_override_args=plan.config_overrides({}, config),
    )
    changed.text_config.architectures = [architecture]
    for part in (changed, changed.text_config):
        assert [i for i in (3, 7, 11) if dsa_layer_skips_topk(part, i)] == [7, 11]


def test_every_supported_architecture_is_tested_or_has_a_reason() -> None:
    # Resolving it needs an image processor; its config is tested above.
    multimodal = {"Glm5NextForConditionalGeneration"}
    mine = [family for family in FAMILIES if not family.refused and not family.unsupported]
    architectures = {family.architecture for family in mine}
    assert architectures == set(MODELS) | multimodal


def test_sglang_still_loads_no_indexer_for_mistral() -> None:
    """The two families can come into ``models.py`` once this fails."""
    from sglang.srt.models.mistral_large_3 import MistralLarge3ForCausalLM

    assert not any("indexer" in target for target in MistralLarge3ForCausalLM.remapping.values())


def test_name_becomes_dsa_and_the_input_stays(model: Callable[..., Path]) -> None:
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view

    server_args = resolve(model(), "--indexcache-pattern", "full")
    assert server_args.attention_backend == "indexcache"
    assert attention_backends_of(resolved_view(server_args)) == ("dsa", "dsa")


def test_pattern_alone_implies_the_backend(model: Callable[..., Path]) -> None:
    server_args = resolve(model(), "--indexcache-pattern", "uniform:1/2", backend=None)
    assert built_pattern(server_args) == "FSFSFSFS"


def test_metrics_go_through_sglangs_own_door(model: Callable[..., Path]) -> None:
    from sglang.srt.arg_groups.overrides import resolved_view

    def loggers(*arguments: str) -> Any:
        worker = pickle.loads(pickle.dumps(resolve(model(), *arguments)))
        return resolved_view(worker).stat_loggers

    assert loggers() is None
    assert loggers("--enable-metrics")["scheduler"].__name__ == "SchedulerCollector"


def test_other_overrides_are_kept(model: Callable[..., Path]) -> None:
    server_args = resolve(
        model(),
        *("--indexcache-pattern", "FSS"),
        *("--json-model-override-args", '{"num_hidden_layers": 3, "my_key": {"a": 1}}'),
    )
    config = hf_config(server_args)
    assert config.num_hidden_layers == 3
    assert config.my_key == {"a": 1}
    assert built_pattern(server_args, 3) == "FSS"


def test_one_clear_log_line(model: Callable[..., Path], capfd: pytest.CaptureFixture[str]) -> None:
    resolve(model(), "--indexcache-pattern", "FSSFSFSS")
    lines = [line for line in capfd.readouterr().err.splitlines() if "keep their indexer" in line]
    assert len(lines) == 1
    assert "3 of 8" in lines[0]
    assert "5 reuse" in lines[0]
    assert "--indexcache-pattern FSSFSFSS" in lines[0]


def test_default_warns_once(model: Callable[..., Path], capfd: pytest.CaptureFixture[str]) -> None:
    server_args = resolve(model())
    assert built_pattern(server_args) == "FFFFFFFF"
    assert capfd.readouterr().err.count("every layer runs its indexer") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--indexcache-pattern", "FSS"], "5 too short"),
        (["--prefill-attention-backend", "fa3"], "does not go with --prefill-attention-backend"),
        (["--kv-cache-dtype", "fp8_e4m3"], "needs a GPU"),
        (["--indexcache-kernels", "cuda"], "cuda chooses GPU kernels, and the CPU platform has"),
        (["--device", "cuda"], "no accelerator is visible"),
        (["--use-ray"], "does not work with --use-ray"),
        (
            ["--indexcache-mode", "live", "--indexcache-pattern", "FFFFSFFF", "--pp-size", "2"],
            "pipeline stages start at layer 4, where",
        ),
        (
            ["--indexcache-mode", "live", "--cuda-graph-config", '{"decode": {"backend": "full"}}'],
            "live mode does not work with decode graphs",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_bad_combination(model: Callable[..., Path], arguments: list[str], message: str) -> None:
    with pytest.raises(IndexCacheError, match=message):
        resolve(model(), *arguments)


def test_wide_index_keys_have_no_fp8_pages(model: Callable[..., Path]) -> None:
    """They have none on the CPU platform; a GPU has no other pages (``test_gpu_stand_in.py``)."""
    folder = model(index_head_dim=192, qk_rope_head_dim=192)
    for mode in ("static", "live"):
        for dtype in ("auto", "bfloat16", "float32"):
            options = ["--indexcache-mode", mode, "--indexcache-index-k-dtype", dtype]
            assert hf_config(resolve(folder, *options)).index_head_dim == 192
        with pytest.raises(IndexCacheError, match="128 entries a key, and this model's keys have"):
            resolve(folder, *options[:3], "fp8_e4m3")


KERNEL_SHAPE = {"kv_lora_rank": 512, "index_n_heads": 32}
"""What our kernels need besides :data:`BASE`."""


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline decides as on an H100; only our own refusal of GPU flags is switched off."""
    from sglang_indexcache.kernels import dispatch
    from sglang_indexcache.serving.cpu import platform as platform_cpu

    card = dispatch.Machine("NVIDIA H100", (9, 0))
    monkeypatch.setattr(dispatch.Machine, "here", classmethod(lambda cls: card))
    present = tuple(
        replace(implementation, missing=lambda: None) for implementation in dispatch.IMPLEMENTATIONS
    )
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", present)
    monkeypatch.setattr(platform_cpu, "check_plan", lambda *_: None)


def test_kernels_are_checked_on_what_sglang_resolved(
    hopper: None, model: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """Every field that the choice reads is where SGLang keeps it; a worker gets what was chosen."""
    from sglang.srt.configs.model_config import ModelConfig

    server_args = resolve(model(**KERNEL_SHAPE), "--indexcache-kernels", "cuda")
    log = capfd.readouterr().err
    for op in ("select in prefill", "select in decode", "sparse_mla in decode"):
        assert log.count(f"IndexCache kernels: {op}: cuda (asked for)") == 1
    worker = pickle.loads(pickle.dumps(server_args))
    shape = ModelConfig.from_server_args(worker)
    plan = Plan.from_hf_config(shape.hf_config)
    assert plan is not None
    assert plan.kernels == "cuda"
    assert [(route.op, route.phase) for route in plan.routes] == list(ROUTED)
    assert {route.implementation for route in plan.routes} == {"cuda"}


def test_reference_kernels_need_eager_forwards(hopper: None, model: Callable[..., Path]) -> None:
    """Adding what the message says mends it."""
    from sglang_indexcache.serving import plugin

    server_args = resolve(
        model(**KERNEL_SHAPE),
        *("--indexcache-kernels", "reference"),
        *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
    )
    graphs = plugin.resolving_view(server_args).cuda_graph_config
    graphs.decode.backend = "full"
    with pytest.raises(IndexCacheError, match="--cuda-graph-backend-decode disabled"):
        plugin._route_kernels(server_args)


def test_two_batch_overlap_is_allowed_with_a_plan_only() -> None:
    """A plan's buffer carries the indices that SGLang's check knows to be dropped."""
    from sglang.srt.arg_groups import model_hook, overrides

    def check(**config: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            flags = SimpleNamespace(enable_two_batch_overlap=True)
            for module in (model_hook, overrides):
                patch.setattr(module, "resolving_view", lambda _: flags)
            model_hook._validate_dsa_tbo_index_sharing(flags, SimpleNamespace(**config))

    check()
    with pytest.raises(ValueError, match="not supported with DSA index-topk sharing"):
        check(index_topk_freq=4)
    pattern = Pattern("FSFSFSFS")
    layers, architecture = tuple(range(8)), "GlmMoeDsaForCausalLM"
    plan = Plan(pattern, "test", "static", pattern, layers, architecture)
    check(**{"index_topk_freq": 4} | plan.hf_overrides())


def test_doctor_says_why_the_plugin_is_not_there(
    model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    command = ["-m", "sglang_indexcache.cli", "server", "doctor", "--model-path", str(model())]
    process = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False
    )
    assert process.returncode == 1
    assert "did not load this plugin because of SGLANG_PLUGINS=another" in process.stdout


def test_settings_with_another_backend(model: Callable[..., Path]) -> None:
    with pytest.raises(IndexCacheError, match="does not go with --attention-backend triton"):
        resolve(model(), "--indexcache-pattern", "full", backend="triton")
    with pytest.raises(IndexCacheError, match="needs --attention-backend indexcache"):
        resolve(model(), "--indexcache-pattern", "full", backend="dsa")


def test_plain_dsa_on_a_cpu_says_what_to_use(model: Callable[..., Path]) -> None:
    with pytest.raises(IndexCacheError, match="Use --attention-backend indexcache"):
        resolve(model(), backend="dsa")


def test_a_dsa_model_without_any_flag_is_served_on_a_cpu(
    model: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """It must be after "turn it off" on a laptop, where SGLang's own backend cannot run."""
    server_args = resolve(model(), backend=None)
    assert Plan.from_hf_config(hf_config(server_args)) is not None
    assert built_pattern(server_args) == "F" * 8
    assert "so this server runs with --attention-backend indexcache" in capfd.readouterr().err


def test_ignored_override_without_the_backend_warns(
    model: Callable[..., Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_indexcache.serving.plugin.platform_cpu.is_active", lambda: False)
    resolve(model(), "--json-model-override-args", '{"index_topk_freq": 4}', backend=None)
    assert "SGLang ignores index_topk_freq" in capfd.readouterr().err


def test_help_shows_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    from sglang.srt.server_args import prepare_server_args

    with pytest.raises(SystemExit):
        prepare_server_args(["--help"])  # what launch_server makes of its arguments
    help_text = capsys.readouterr().out
    for option in OPTIONS:
        assert option.flag in help_text
    assert ",indexcache}" in help_text


def test_the_drafts_backend_is_resolved_like_the_others(model: Callable[..., Path]) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view

    draft = ["--speculative-draft-attention-backend", "indexcache"]
    assert resolving_view(resolve(model(), *draft)).speculative_draft_attention_backend == "dsa"
    with pytest.raises(SettingsError, match="needs --attention-backend indexcache"):
        resolve(model(), *draft, backend="dsa")


def test_a_process_does_not_outlive_a_server_that_was_killed_at_its_start(tmp_path: Path) -> None:
    """The child still loads modules then, before SGLang asks for a signal at its parent's death."""
    code = """
import multiprocessing, os, signal, sys, time

def child(ready):
    from sglang_indexcache.serving import plugin  # as SGLang's, this takes a while
    ready.send(None)
    ready.close()
    while os.getppid() == parent:
        time.sleep(0.05)
    try:
        plugin.register()
    except SystemExit as error:
        print(error, file=open(sys.argv[1], "w"), flush=True)

parent = os.getpid()
ours, theirs = multiprocessing.Pipe()
multiprocessing.get_context("fork").Process(target=child, args=[theirs]).start()
ours.recv()
os.kill(parent, signal.SIGKILL)
"""
    words_file = tmp_path / "said"
    subprocess.run([sys.executable, "-c", code, str(words_file)], check=False)
    deadline = time.monotonic() + 60
    while not (words_file.exists() and words_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "the server was killed while this process of it started" in words_file.read_text()


# -- what is said twice, or in vain ------------------------------------------------


def test_a_pattern_that_is_given_twice(
    model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    twice = ["--indexcache-pattern", "full", "--indexcache-pattern"]
    assert built_pattern(resolve(model(), *twice, "full")) == "F" * 8
    with pytest.raises(SystemExit):
        resolve(model(), *twice, "uniform:1/4")
    assert "--indexcache-pattern is given twice, as 'full' and as" in capsys.readouterr().err
