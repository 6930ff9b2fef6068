"""``server doctor``: what it prints, asked about the CPU platform."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sglang_indexcache.cli import app
from sglang_indexcache.errors import SettingsError
from sglang_indexcache.lab.evaluate.pattern_file import add_evaluated
from sglang_indexcache.library.digest import checkpoint_digest
from sglang_indexcache.library.files import Evaluated
from sglang_indexcache.library.resolve import Library
from sglang_indexcache.library.writing import shipped
from sglang_indexcache.models import BY_ARCHITECTURE
from sglang_indexcache.serving.operating import doctor
from tests.fakes import glm5

pytest.importorskip("sglang")

CONFIG = {
    **glm5.CONFIG,
    "model_type": "glm_moe_dsa",
    "index_n_heads": 32,
    "dtype": "bfloat16",
    **BY_ARCHITECTURE["GlmMoeDsaForCausalLM"].extra_config,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    level = logging.root.level  # which SGLang sets as it resolves
    yield tmp_path
    logging.root.setLevel(level)


def examine(*arguments: object) -> tuple[bool, str]:
    output, words = io.StringIO(), [str(argument) for argument in arguments]
    examination = doctor.examine(words, "cpu")
    examination.tell(Console(file=output, width=200))
    return not examination.problems, output.getvalue()


def test_findings_come_first_and_the_layers_last(folder: Path) -> None:
    fine, output = examine("--model-path", folder, "--indexcache-pattern", "1/4")
    assert fine
    for text in (
        f"{folder} (GlmMoeDsaForCausalLM)",
        "78 layers, 32 heads, top 2048",
        "ships every indexer",
        "--indexcache-pattern 1/4 (library entry glm-5-1of4)",
        "22 of 78 layers keep their indexer",
        "index-K saved  7392 of 10296 bytes per token on GPUs, ",  # 56 x 132
    ):
        assert text in output
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    assert lines[:2] == ["checked for: the CPU reference platform", "no problem found"]


def test_wider_index_keys_are_served_here_and_no_gpu_memory_is_told(folder: Path) -> None:
    """The advice of a node with GPUs is in ``test_gpu_stand_in.py``."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, "index_head_dim": 192}))
    fine, text = examine("--model-path", folder, "--indexcache-pattern", "1/4")
    assert fine, text
    assert "index-K saved  that of 56 of 78 layers" in text
    assert "GPU" not in text.partition("index-K saved")[2].partition("\n")[0]


def test_nothing_shared(folder: Path) -> None:
    _, text = examine("--model-path", folder)
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    assert lines[2].startswith("advice")
    assert lines[-1] == "  F   0 to 77  each serves itself only"
    assert "nothing: every layer is F" in text


def test_it_knows_the_checkpoints_own_sharing(folder: Path) -> None:
    types = (["full"] + ["shared"] * 2) * 26
    (folder / "config.json").write_text(json.dumps({**CONFIG, "indexer_types": types}))
    fine, text = examine("--model-path", folder)
    assert fine
    assert "shares already: 26 of 78" in text


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--indexcache-mode", "fast"], "argument --indexcache-mode: invalid choice: 'fast'"),
        (["--indexcache-pattern", "FSS"], "75 too short"),
        (["--indexcache-pattern"], "expected one argument"),
    ],
)
def test_what_is_wrong_is_one_line(folder: Path, arguments: list[str], message: str) -> None:
    fine, text = examine("--model-path", folder, *arguments)
    assert not fine
    assert message in text
    assert text.count("problem") == 1
    assert text.count("\n") == 2  # after what it looks at


def test_it_says_why_our_kernels_cannot_run_here(folder: Path) -> None:
    fine, text = examine("--model-path", folder, "--indexcache-kernels", "cuda")
    assert not fine
    assert "cuda cannot run on CPU: needs an NVIDIA GPU" in text


def test_problems_hide_neither_each_other_nor_the_pattern(folder: Path) -> None:
    """A config as transformers writes it lacks fields; another is beyond what SGLang builds."""
    extra = BY_ARCHITECTURE["GlmMoeDsaForCausalLM"].extra_config
    config = {name: CONFIG[name] for name in CONFIG if name not in extra}
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    fine, answer = examine("--model-path", folder, "--indexcache-pattern", "1/4")
    assert not fine
    for text in ("Add to its config.json", "hidden_act is 'gelu' and must be silu"):
        assert text in answer
    assert "22 of 78 layers keep their indexer" in answer
    assert "no problem found" not in answer


@pytest.mark.parametrize("name", ["/no/such/folder", "./models/mine", "~/model"])
def test_a_path_that_is_not_there_is_told_before_sglang_asks_the_hub(name: str) -> None:
    fine, text = examine("--model-path", name)
    assert not fine
    assert text == f"problem: there is no folder {name} here\n"


@pytest.mark.parametrize(
    ("fields", "overrides", "message"),
    [
        ({"num_hidden_layers": "78"}, {}, "config.json is malformed: num_hidden_layers is '78'"),
        ({"attention_bias": "no"}, {}, "field 'attention_bias'"),  # transformers' own words
        ({"moe_layer_freq": [1]}, {}, "moe_layer_freq must be a whole number"),
        ({}, {"index_topk_freq": "2"}, "model-override-args is malformed: index_topk_freq is '2'"),
        ({}, {"text_config": {"indexer_types": 0}}, "indexer_types is 0"),
        ({}, {"attention_bias": "no"}, "field 'attention_bias'"),
    ],
)
def test_a_field_of_another_type_is_named(
    folder: Path, fields: dict[str, object], overrides: dict[str, object], message: str
) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))
    overriding = ("--json-model-override-args", json.dumps(overrides))
    fine, text = examine("--model-path", folder, *overriding)
    assert not fine
    assert message in text
    assert text.count("problem") == 1


def test_without_arguments_it_says_how_it_is_used() -> None:
    fine, text = examine()
    assert not fine
    assert "--model-path MODEL" in text


def test_without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "SGLang is not installed. Install it: pip" in examine("--model-path", "m")[1]


def test_an_unknown_device() -> None:
    [problem] = doctor.examine(["--model-path", "m"], "tpu").problems
    assert "--device may be cpu, cuda, h100, h200, b200, got 'tpu'" in problem


def test_a_problem_is_printed_as_it_is() -> None:
    """Brackets are no markup."""
    output = io.StringIO()
    doctor._say(Console(file=output), "[red]problem[/red]", "a [bold] folder")
    assert output.getvalue() == "problem: a [bold] folder\n"


def test_json_has_what_is_printed_and_nothing_else_is_on_stdout(folder: Path) -> None:
    arguments = ("--device", "cpu", "--model-path", str(folder), "--indexcache-pattern")
    result = CliRunner().invoke(app, ["server", "doctor", "--json", *arguments, "1/4"])
    answer = json.loads(result.stdout)
    assert result.exit_code == 0
    server = answer.pop("server")
    assert answer.pop("pattern") == str(Library.default().get("glm-5-1of4").pattern)
    checked_for = "the CPU reference platform"
    assert answer == {
        "fine": True, "checked_for": checked_for, "problems": [], "notes": [], "advice": "",
    }  # fmt: skip
    assert {*server} == {
        *("model", "indexers", "checkpoint", "pattern", "mode", "quality", "index_k_saved", "uses")
    }
    _, output = examine(*arguments[2:], "1/4")
    for value in server.values():
        for line in [value] if isinstance(value, str) else value:
            assert line[:60] in output
    result = CliRunner().invoke(app, ["server", "doctor", "--json", *arguments, "FSS"])
    answer = json.loads(result.stdout)
    assert result.exit_code == 1
    assert (answer["fine"], answer["server"], answer["pattern"]) == (False, {}, None)
    assert "75 too short" in answer["problems"][0]


def test_it_says_at_once_that_it_is_at_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so before SGLang is imported or asks the hub, and not among its findings."""

    def resolve(arguments: Sequence[str], device: str | None) -> None:
        raise SettingsError(f"asked after: {capsys.readouterr().err}")

    monkeypatch.setattr(doctor, "_resolve", resolve)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "asked after: asking SGLang" in examine("--model-path", "m")[1]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert "nosuchfolder is no folder here, so the hub" in examine("--model", "nosuchfolder")[1]
