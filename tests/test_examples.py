"""Examples: what they name is there, and those that need no GPU run."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from transformers import AutoTokenizer

from sglang_indexcache.cli import app
from sglang_indexcache.lab.demo import shipped_checkpoint
from sglang_indexcache.lab.evaluate.tasks.files import FILES, Item, read_items
from tests.fakes import state
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


def test_rows_of_a_public_set_become_prompts(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Prepend aB3 to the 2nd poem."}]
    row = {"prompt": json.dumps(talk), "answer": "aB3 Tapirs!", "n_needles": 2}
    source, target = tmp_path / "mrcr.jsonl", tmp_path / "own.jsonl"
    source.write_text(f"{json.dumps(row)}\n" * 2)
    runpy.run_path(str(EXAMPLES / "public_rows.py"))["main"](str(source), str(target))
    items = [item for _, item in read_items(FILES["prompts"], target)]
    assert items == [Item(tuple(talk), "aB3 Tapirs!")] * 2


class FakeClient:
    """Answers as SGLang does, the right word where ``right``; ``calls`` has the turns of all."""

    def __init__(self, name: str, right: Any, calls: list[tuple[str, int]]) -> None:
        self.name, self.right, self.calls = name, right, calls

    def generate(self, input_ids: list[list[int]], **_: Any) -> list[dict[str, Any]]:
        return [{"text": self.right.get(tuple(ids), "?")} for ids in input_ids]

    def stream(self, input_ids: list[list[int]], **_: Any) -> Iterator[dict[str, Any]]:
        [ids] = input_ids
        self.calls.append((self.name, ids[0]))
        for token in range(1, 33):
            meta = {"prompt_tokens": len(ids), "cached_tokens": 0, "completion_tokens": token}
            yield {"meta_info": meta | {"finish_reason": {"type": "length"}}}

    def states(self) -> list[Any]:
        return [state("FSSS", index_k_bytes_per_token=132)]


@pytest.fixture
def demo() -> Any:
    spec = importlib.util.spec_from_file_location("examples_demo", EXAMPLES / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_demo_asks_both_servers_in_turns_and_stops_them(
    demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shipped_checkpoint())
    material = demo.questions(tokenizer)
    assert len(material) == len({tuple(ids) for ids, _ in material}) == 32
    for ids, answer in material:  # each can be answered from its prompt, in one token
        text, _, name = tokenizer.decode(ids).rpartition("\n? ")
        assert f"{text}\n".count(f"\n# {name}{answer}\n") == 1
        assert len(tokenizer(answer, add_special_tokens=False)["input_ids"]) == 1
    texts = demo.prompts(tokenizer)
    assert {len(ids) for ids in texts} == {demo.PROMPT_TOKENS}
    assert len({tuple(ids[:16]) for ids in texts}) == 1 + demo.ROUNDS
    events: list[str] = []
    calls: list[tuple[str, int]] = []
    right = {tuple(ids): answer for ids, answer in material}

    class FakeServer:
        def __init__(self, arguments: list[str], log: Path, env: dict[str, str]) -> None:
            self.name, self.sockets = log.stem, Path(env["TMPDIR"])
            assert arguments[-1] == {"all F": "full", "1of4": "1/4"}[self.name]

        def start(self) -> None:
            events.append(f"start {self.name}")

        def wait_until_ready(self) -> Any:
            return FakeClient(self.name, right if self.name == "all F" else {}, calls)

        def stop(self, grace: float) -> None:
            assert self.sockets.is_dir()  # removed after the servers, not before
            events.append(f"stop {self.name}")

    monkeypatch.setattr(demo, "Server", FakeServer)
    demo.main(tmp_path / "new" / "folder")
    assert events[:2] == ["start all F", "start 1of4"]
    assert sorted(events[2:]) == ["stop 1of4", "stop all F"]
    assert calls[::2] != calls[1::2]
    assert [name for name, _ in calls] == ["1of4", "all F", *["all F", "1of4", "1of4", "all F"] * 3]
    record = json.loads((tmp_path / "new" / "folder" / "demo.json").read_text())
    assert {name: len(times) for name, times in record["prefill"].items()} == {"all F": 6, "1/4": 6}
    output = capsys.readouterr().out
    assert "32 of 32 answers right" in output
    assert "0 of 32 answers right" in output
    events.clear()
    monkeypatch.setattr(FakeServer, "wait_until_ready", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        demo.main(tmp_path)
    assert sorted(events[2:]) == ["stop 1of4", "stop all F"]


def test_the_demo_says_who_is_faster_only_if_every_round_does(demo: Any) -> None:
    def said_of(*ratios: float) -> str:
        text: str = demo.times_faster(ratios, [1.0] * len(ratios))
        return text

    assert said_of(2.5, 2.4, 6.8, 2.5, 2.5, 2.7) == "2.50x (2.40x to 6.80x)"
    assert said_of(0.8, 0.8, 0.9, 0.8, 0.8, 0.8) == "0.80x (0.80x to 0.90x)"
    assert said_of(1.2, 1.1, 0.9, 1.2, 1.2, 1.2) == "no difference shown (0.90x to 1.20x)"
    assert said_of(2.5, 2.5, 2.5) == "no difference shown (2.50x to 2.50x)"
    # Each round of equal servers is a coin: of all that six coins can show, 2 in 64 mislead.
    tosses = [said_of(*ratios) for ratios in product((0.9, 1.1), repeat=demo.ROUNDS)]
    assert sum("no difference" not in toss for toss in tosses) / len(tosses) == 1 / 32


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
