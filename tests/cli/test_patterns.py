"""The ``indexcache`` command, without a server."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from sglang_indexcache import __version__
from sglang_indexcache.cli.common import _missing
from sglang_indexcache.lab.demo import shipped_checkpoint
from sglang_indexcache.lab.evaluate.pattern_file import add_evaluated
from sglang_indexcache.library.digest import checkpoint_digest
from sglang_indexcache.library.files import Evaluated
from sglang_indexcache.library.resolve import LIBRARY_VARIABLE, Library
from sglang_indexcache.library.writing import shipped
from tests.cli import output_of
from tests.fakes import glm5

patterns = partial(output_of, "patterns")


def test_version() -> None:
    assert __version__ in output_of("--version")


def test_list_shows_every_pattern() -> None:
    output = patterns("list")
    for name in Library.default().entries:
        assert name in output


def test_list_tells_which_files_are_left_out_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half.yaml").write_text("pattern: [FSFS")
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path))
    output = patterns("list", code=1)
    assert "glm-5-1of4" in output
    assert "half.yaml is not valid YAML" in output
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path / "typo"))
    assert "which is no folder here" in patterns("list", code=1)


def test_list_fits_80_columns() -> None:
    """The command runs in a process of its own, for the width is read once."""
    output = subprocess.run(
        [sys.executable, "-m", "sglang_indexcache.cli", "patterns", "list"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "80"},
    ).stdout
    entries = Library.default().entries.values()
    rows = {line.split()[0]: line for line in output.splitlines() if line.strip()}
    assert max(map(len, output.splitlines())) <= 80
    for entry in entries:
        for text in (entry.model.name, f"{entry.full_layers} of", entry.retention):
            assert text in rows[entry.name]
        assert rows[entry.name].rstrip().endswith("greedy")
    assert len(rows) == len(entries) + 2  # a head and a rule


def test_list_for_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(glm5.CONFIG))
    output = patterns("list", "--model", str(tmp_path))
    assert "glm-5-1of4" in output
    assert "flash" not in output
    (tmp_path / "config.json").write_text(json.dumps({**glm5.CONFIG, "hidden_size": 1}))
    assert "no pattern in the library fits" in patterns("list", "--model", str(tmp_path))


def test_list_for_a_model_that_is_none(tmp_path: Path) -> None:
    assert "cannot read" in patterns("list", "--model", str(tmp_path), code=1)
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in patterns("list", "--model", str(tmp_path), code=1)


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("glm-5-1of4", ("22 of 78", "greedy", "2603.12201", "RULER", "97.6", "Table 4")),
        (
            "FSSFS",
            ("FSSFS", "F 0 also serves the 2 layers behind", "F 3 also serves the 1 layer"),
        ),
    ],
)
def test_show_draws_and_tells_what_is_known(pattern: str, texts: tuple[str, ...]) -> None:
    output = patterns("show", pattern)
    for text in texts:
        assert text in output


def test_show_has_the_provenance_of_those_that_have_one(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(Path("patterns/glm-5-1of4.yaml").read_text())
    assert "Table 4" in patterns("show", str(file))
    output = patterns("show", "FSSFS", "glm-5-1of4")
    assert output.index("F 3 also serves the 1") < output.index("22 of 78")
    assert output.count("found by") == 1
    assert "found by" not in patterns("show", "FSSFS")


def test_show_checks_every_file(tmp_path: Path) -> None:
    shipped = [str(path) for path in sorted(Path("patterns").glob("*.yaml"))]
    assert patterns("show", *shipped).count("layers keep") == len(shipped)
    broken = tmp_path / "broken.yaml"
    broken.write_text("pattern: FSX")
    output = patterns("show", *shipped, str(broken), "SFF", code=1)
    assert "name: Field required" in output
    assert "starts with S" in output
    assert output.count("layers keep") == len(shipped)


def test_show_takes_forms_that_depend_on_the_model(tmp_path: Path) -> None:
    config = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "num_hidden_layers": 8,
        "index_topk": 64,
        "index_topk_pattern": "FFFSSSFS",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ("--model", str(tmp_path))
    assert "4 of 8" in patterns("show", "full", *model)
    assert "ships no indexer weights" in patterns("show", "uniform:1/4", *model, code=1)


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    output = output_of(
        "bench", "latency", "--model", shipped_checkpoint(), "-o", "anywhere", code=1
    )
    assert "needs matplotlib" in output
    assert "pip install '.[eval]'" in output


@pytest.mark.parametrize(
    ("package", "group", "extra"),
    [
        ("torch", "heal", "lab"),
        ("torch", "kernels", "kernels"),
        ("numpy", "search", "lab"),
        ("numpy", "eval", "eval"),
        ("matplotlib", "bench", "eval"),
        ("sglang", "search", "serve"),
        ("httpx", None, "lab"),
    ],
)
def test_extras_by_command(package: str, group: str | None, extra: str) -> None:
    assert f"pip install '.[{extra}]'" in _missing(package, group)


def test_show_says_what_is_known_of_a_patterns_quality(tmp_path: Path) -> None:
    path = tmp_path / "tiny-dsa-1of8.yaml"
    path.write_bytes((shipped("patterns") / path.name).read_bytes())
    model = shipped_checkpoint()
    show = ("show", path)
    assert "not evaluated on this checkpoint" in patterns(*show, "--model", str(model))
    row = Evaluated(
        verdict="loss", margin=0.01, difference=-0.019, contexts=40, pairs=160, tasks=("notes",),
        lengths=(512,), checkpoint=checkpoint_digest(model), commit="abc", date="2026-11-22",
    )  # fmt: skip
    add_evaluated(path, row)
    output = patterns(*show, "--model", str(model))
    assert "measured here: it loses 1.9 points of right answers" in output
    assert checkpoint_digest(model)[:12] in output
    assert "evaluated" in patterns(*show)
