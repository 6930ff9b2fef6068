"""The ``indexcache`` command, without a server."""

import json
from pathlib import Path

from typer.testing import CliRunner

from sglang_indexcache import __version__
from sglang_indexcache.cli import app
from sglang_indexcache.library import Library

runner = CliRunner()


def run(*arguments: str) -> str:
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def fail(*arguments: str) -> str:
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == 1
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.output


def test_version() -> None:
    assert __version__ in run("--version")


def test_list_shows_every_pattern() -> None:
    output = run("patterns", "list")
    for name in Library.default().entries:
        assert name in output


def test_list_for_a_model(tmp_path: Path) -> None:
    config = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "num_hidden_layers": 78,
        "hidden_size": 6144,
        "num_attention_heads": 64,
        "n_routed_experts": 256,
        "index_topk": 2048,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    output = run("patterns", "list", "--model", str(tmp_path))
    assert "glm-5-1of4" in output
    assert "flash" not in output
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 1}))
    assert "no pattern in the library fits" in run("patterns", "list", "--model", str(tmp_path))


def test_list_for_a_model_that_is_none(tmp_path: Path) -> None:
    assert "cannot read" in fail("patterns", "list", "--model", str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in fail("patterns", "list", "--model", str(tmp_path))


def test_show_has_provenance_and_quality() -> None:
    output = run("patterns", "show", "glm-5-1of4")
    for text in ("22 of 78", "greedy", "2603.12201", "RULER", "97.6", "Table 4"):
        assert text in output


def test_show_unknown_name() -> None:
    assert "no pattern is called 'nope'" in fail("patterns", "show", "nope")


def test_validate(tmp_path: Path) -> None:
    shipped = [str(path) for path in sorted(Path("patterns").glob("*.yaml"))]
    assert run("patterns", "validate", *shipped).count("layers keep") == len(shipped)
    broken = tmp_path / "broken.yaml"
    broken.write_text("pattern: FSX")
    output = fail("patterns", "validate", *shipped, str(broken))
    assert "name: Field required" in output
    assert output.count("layers keep") == len(shipped)


def test_draw_in_the_terminal() -> None:
    output = run("patterns", "draw", "FSSFS")
    assert "FSSFS" in output
    assert "F   0  also serves 1-2 (2 layers)" in output
    assert "F   3  also serves 4" in output
    assert "starts with S" in fail("patterns", "draw", "SFF")


def test_draw_a_picture(tmp_path: Path) -> None:
    path, magic = tmp_path / "p.png", b"\x89PNG"
    run("patterns", "draw", "glm-5-1of4", "FSSFS", "-o", str(path))
    content = path.read_bytes()
    assert content.startswith(magic)
    assert len(content) > 5000
    assert "written as PNG" in fail("patterns", "draw", "FSSFS", "-o", str(tmp_path / "p.svg"))


def test_live_without_a_server() -> None:
    output = fail("server", "show", "--url", "http://127.0.0.1:9")
    assert "cannot reach" in output


def test_make_model_rejects_nonsense(tmp_path: Path) -> None:
    assert "preset 'gpt' is unknown" in fail("demo", "model", str(tmp_path), "--preset", "gpt")
    assert "size 'huge' is unknown" in fail("demo", "model", str(tmp_path), "--size", "huge")
    assert "--field wants NAME=VALUE" in fail("demo", "model", str(tmp_path), "--field", "layers")
    assert "at least 261 entries" in fail("demo", "model", str(tmp_path), "--vocab-size", "100")
