"""Examples: what they name is there, and those that need no GPU run."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer

from sglang_indexcache.cli import app
from tests.launch_lines import (
    indexcache_lines,
    lines_of,
    server_lines,
    shell_in,
    unknown_flags,
)
from tests.test_docs import IDS, PAGES

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.sh"))


def test_the_page_names_every_example_and_no_other() -> None:
    names = set(re.findall(r"\]\(([\w.]+)\)", (EXAMPLES / "README.md").read_text()))
    assert names == {path.name for path in EXAMPLES.iterdir() if path.name != "README.md"} - {
        "__pycache__"
    }


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_bash(script: Path) -> None:
    assert script.stat().st_mode & 0o100
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_names_flags_of_the_command(script: Path) -> None:
    command = typer.main.get_command(app)
    for line in indexcache_lines(script.read_text()):
        assert line.unknown(command) == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_names_flags_of_the_engine(script: Path) -> None:
    lines = server_lines(script.read_text())
    assert lines
    for line in lines:
        assert unknown_flags(line) == [], line


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_a_page_names_flags_of_the_engine(page: Path) -> None:
    for line in server_lines(shell_in(page.read_text())):
        assert unknown_flags(line) == [], line


def test_the_loss_falls_in_a_loop() -> None:
    pytest.importorskip("torch")
    losses = runpy.run_path(str(EXAMPLES / "loss_in_a_loop.py"))["main"]()
    assert losses[14] < 0.9 * losses[0]
    assert losses[-1] < losses[15]


def test_the_loss_falls_on_a_model_in_transformers_trainer() -> None:
    pytest.importorskip("accelerate")
    names = runpy.run_path(str(EXAMPLES / "loss_on_a_model.py"))
    losses = names["main"](steps=4)
    assert len(losses) == 4
    assert losses[-1] < 0.95 * losses[0]


def test_the_client_reads_the_pattern_of_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    client = runpy.run_path(str(EXAMPLES / "client.py"))

    def post(url: str, **request: Any) -> httpx.Response:
        assert request["json"]["return_meta_info"]
        pattern = request["json"]["custom_params"].get("indexcache_pattern", "FSSS")
        choice = {
            "message": {"content": "It picks tokens."},
            "meta_info": {"indexcache_pattern": [pattern]},
        }
        return httpx.Response(200, json={"choices": [choice]}, request=httpx.Request("POST", url))

    monkeypatch.setattr(httpx, "post", post)
    assert client["ask"]("http://server", None) == ("It picks tokens.", "FSSS")
    assert client["ask"]("http://server", "full") == ("It picks tokens.", "full")


def test_the_notebook_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its code cells, in order, as a notebook runs them."""
    pytest.importorskip("torch")
    import matplotlib as mpl

    mpl.use("Agg")
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "share_and_overlap.ipynb").read_text())
    names: dict[str, object] = {}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []  # none is committed: nobody could tell whether it is true
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    assert (tmp_path / "overlap.png").stat().st_size > 1000
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    full, best, uniform = losses
    assert abs(best - full) < abs(uniform - full)


@pytest.mark.parametrize("page", [*PAGES, EXAMPLES / "share_and_overlap.ipynb"], ids=str)
def test_an_install_line_works_in_a_clone(page: Path) -> None:
    """No index has a release, so a package's name in such a line fails, or finds a stranger's."""
    lines = re.findall(r"pip install [^\n`\\]*", page.read_text())
    assert not [line for line in lines if "sglang-indexcache" in line]


def test_lines_are_joined_and_read() -> None:
    text = "indexcache server show \\\n    --url X # and so on\nsglang serve --tp 8\n"
    assert lines_of(text)[0].split() == ["indexcache", "server", "show", "--url", "X"]
    assert server_lines(text) == ["sglang serve --tp 8"]
