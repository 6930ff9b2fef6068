"""``server doctor`` where SGLang is not installed: the checkpoint and the pattern alone."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file

from sglang_indexcache.adapter import indexer_layer, write_adapter
from sglang_indexcache.demo import shipped_checkpoint
from sglang_indexcache.errors import SettingsError
from sglang_indexcache.library import Evaluated, add_evaluated
from sglang_indexcache.models import BY_ARCHITECTURE
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving import doctor
from sglang_indexcache.serving.settings import Plan
from sglang_indexcache.study.provenance import checkpoint_digest
from sglang_indexcache.support.files import shipped
from tests.fakes import glm5

CONFIG = {
    **glm5.CONFIG,
    "index_n_heads": 32,
    **BY_ARCHITECTURE["GlmMoeDsaForCausalLM"].extra_config,
}


@pytest.fixture(autouse=True)
def no_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "sglang" else there(name)
    )
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.delenv("SGLANG_INDEXCACHE_PATTERN", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def examine(*arguments: object) -> tuple[bool, str]:
    said = io.StringIO()
    fine = doctor.examine([str(argument) for argument in arguments], Console(file=said, width=200))
    return fine, said.getvalue()


def test_it_says_what_the_config_tells(folder: Path) -> None:
    fine, said = examine("--model-path", folder, "--indexcache-pattern", "1/4", "--tp", 8)
    assert fine
    for text in (
        f"{folder} (GlmMoeDsaForCausalLM)",
        "78 layers, 32 heads, top 2048",
        "ships every indexer",
        "--indexcache-pattern 1/4 (library entry glm-5-1of4)",
        "glm-5-1of2, glm-5-1of4",
        "22 of 78 layers keep their indexer",
        "pip install 'sglang-indexcache[serve]'",
    ):
        assert text in said


def test_it_says_what_is_known_of_the_patterns_quality_on_these_weights(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (folder / "model.safetensors").write_bytes(b"weights")
    path = tmp_path_factory.mktemp("library") / "glm-5-1of4.yaml"
    path.write_bytes((shipped("patterns") / path.name).read_bytes())
    arguments = ("--model-path", folder, "--indexcache-pattern", path)
    assert "not evaluated on this checkpoint" in examine(*arguments)[1]
    row = Evaluated(
        verdict="no loss", margin=0.01, contexts=1536, pairs=12288, tasks=("needles",),
        lengths=(32000, 128000), checkpoint=checkpoint_digest(folder),
    )  # fmt: skip
    add_evaluated(path, row)
    assert "measured here: no loss beyond 1 point" in examine(*arguments)[1]
    (folder / "model.safetensors").write_bytes(b"other weights")
    assert "not evaluated on this checkpoint" in examine(*arguments)[1]
    assert "evaluated" not in examine("--model-path", folder)[1]  # nothing is shared


def test_it_knows_the_checkpoints_own_sharing(folder: Path) -> None:
    types = (["full"] + ["shared"] * 2) * 26
    (folder / "config.json").write_text(json.dumps({**CONFIG, "indexer_types": types}))
    fine, said = examine("--model-path", folder)
    assert fine
    assert "shares already: 26 of 78" in said
    assert "no pattern for this model" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--indexcache-pattern", "FSS"], "75 too short"),
        (["--indexcache-mode", "fast"], "--indexcache-mode is 'fast'; it may be static, live"),
        (["--json-model-override-args", "{"], "invalid 'JSON' value"),
        (["--indexcache-pattern"], "expected one argument"),
    ],
)
def test_what_is_wrong_is_one_line(folder: Path, arguments: list[str], message: str) -> None:
    fine, said = examine("--model-path", folder, *arguments)
    assert not fine
    assert message in said
    assert said.count("problem") == 1
    assert said.count("\n") == 2  # after what it looks at


def test_all_that_is_wrong_is_said_at_once(folder: Path) -> None:
    bare = {name: value for name, value in CONFIG.items() if name != "topk_method"}
    (folder / "config.json").write_text(json.dumps(bare))
    fine, said = examine("--model-path", folder, "--indexcache-pattern", "FSS")
    assert not fine
    assert [line.split()[0] for line in said.splitlines()] == ["checked", "problem", "problem"]
    assert "75 too short" in said
    assert "topk_method" in said


def test_findings_come_first_and_the_layers_last(folder: Path) -> None:
    _, said = examine("--model-path", folder, "--indexcache-pattern", "uniform:1/2")
    lines = [line.rstrip() for line in said.splitlines() if line.strip()]
    assert lines[0].startswith("checked for")
    assert lines[1] == "no problem found"
    assert lines[-1] == "  F   0 to 76  39 F layers, each also serves the layer behind it"
    assert "index-K saved  5148 of 10296 bytes per token (fp8 pages)" in said


def test_nothing_shared_is_one_line(folder: Path) -> None:
    _, said = examine("--model-path", folder)
    lines = [line.rstrip() for line in said.splitlines() if line.strip()]
    assert lines[2].startswith("advice")
    assert lines[-1] == "  F   0 to 77  each serves itself only"
    assert "nothing: every layer is F" in said


def test_an_unknown_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    said = io.StringIO()
    assert not doctor.examine(["--model-path", "m"], Console(file=said, width=200), "tpu")
    assert "--device may be cpu, cuda, h100, h200, b200, got 'tpu'" in said.getvalue()


def test_without_arguments_it_says_how_it_is_used() -> None:
    fine, said = examine()
    assert not fine
    assert "--model-path MODEL" in said
    assert "--url URL" in said


def test_it_names_the_lines_that_transformers_does_not_write(folder: Path) -> None:
    lines = BY_ARCHITECTURE["GlmMoeDsaForCausalLM"].extra_config
    bare = {name: value for name, value in CONFIG.items() if name not in lines}
    (folder / "config.json").write_text(json.dumps(bare))
    fine, said = examine("--model-path", folder)
    assert not fine
    for name, value in lines.items():
        assert f"{json.dumps(name)}: {json.dumps(value)}" in said
    assert said.count("problem") == 1
    assert examine("--model-path", folder, "--json-model-override-args", json.dumps(lines))[0]


def test_a_problem_is_printed_as_it_is() -> None:
    """Brackets are no markup."""
    said = io.StringIO()
    doctor.say_problem(Console(file=said), "a [bold] folder")
    assert said.getvalue() == "problem  a [bold] folder\n"


def test_it_says_at_once_that_it_is_at_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before SGLang is imported, which takes long; and not among its findings."""

    def resolve(arguments: Sequence[str], device: str | None) -> None:
        raise SettingsError(f"asked after: {capsys.readouterr().err}")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(doctor, "_resolve", resolve)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    console = Console(file=(said := io.StringIO()), width=200)
    assert not doctor.examine(["--model-path", "m"], console, "cpu")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert "checked for  the CPU reference platform\n" in said.getvalue()
    assert "asked after: asking SGLang" in said.getvalue()


def test_a_checkpoint_must_be_named() -> None:
    fine, said = examine("--indexcache-pattern", "1/4")
    assert not fine
    assert "say which checkpoint: --model-path FOLDER" in said


@pytest.mark.parametrize(
    ("device", "stored_as", "model_dtype", "expected"),
    [
        (
            "cuda",
            "auto",
            "torch.bfloat16",
            "396 of 528 bytes per token (fp8 pages)",
        ),  # 3 x (128 + 4)
        ("cpu", "auto", "torch.bfloat16", "768 of 1024 bytes per token (bfloat16)"),  # 3 x 2 x 128
        ("cpu", "auto", "torch.float32", "1536 of 2048 bytes per token (float32)"),
        ("cpu", "float32", "torch.bfloat16", "1536 of 2048 bytes per token (float32)"),
        ("cpu", "fp8_e4m3", "torch.bfloat16", "396 of 528 bytes per token (fp8 pages)"),
    ],
)
def test_saved_index_keys_are_counted_as_they_are_stored(
    device: str, stored_as: Any, model_dtype: str, expected: str
) -> None:
    pattern = Pattern("FSSS")
    plan = Plan(
        pattern, "a test", "static", Pattern("FFFF"), (0, 1, 2, 3), "X", index_k_dtype=stored_as
    )
    cfg = SimpleNamespace(device=device, max_total_tokens=None)
    config = SimpleNamespace(index_head_dim=128)
    model = SimpleNamespace(dtype=model_dtype, hf_config=config, context_len=1024)
    assert doctor._saved_here(plan, cfg, model).startswith(expected)


def test_it_needs_nothing_but_the_base(folder: Path) -> None:
    """In a process of its own: here, torch is long loaded."""
    code = (
        "import sys\n"
        "for name in ('sglang', 'torch', 'transformers', 'numpy', 'matplotlib'):\n"
        "    sys.modules[name] = None\n"
        "from sglang_indexcache.cli import app\n"
        "app(sys.argv[1:])\n"
    )
    arguments = ["server", "doctor", "--model-path", str(folder), "--indexcache-pattern", "1/4"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "22 of 78 layers keep their indexer" in done.stdout


def test_a_config_without_the_number_of_heads(folder: Path) -> None:
    config = {name: value for name, value in CONFIG.items() if name != "index_n_heads"}
    (folder / "config.json").write_text(json.dumps(config))
    assert "78 layers, top 2048" in examine("--model-path", folder)[1]


def test_it_checks_an_adapter_and_its_base(tmp_path: Path) -> None:
    model, pattern = shipped_checkpoint(), Pattern.uniform(12, 4)
    weights = load_file(model / "model.safetensors")
    adapter = write_adapter(
        tmp_path / "adapter",
        pattern=pattern,
        checkpoint=model,
        tensors={n: t for n, t in weights.items() if indexer_layer(n) in pattern.full_layers},
        record={},
    )
    fine, said = examine("--model-path", model, "--indexcache-adapter", adapter.folder)
    assert fine
    assert f"({adapter.digest[:12]})" in said.replace("\n", "")
    fine, said = examine("--model-path", model, "--indexcache-adapter", tmp_path)
    assert not fine
    assert "is not an adapter" in said
