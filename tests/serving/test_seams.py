"""The table of what we rely on: that it is whole, and fresh for the SGLang that is installed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from sglang_indexcache.serving import engine_version
from sglang_indexcache.serving.engine_version import SUPPORTED_VERSION, EngineSource, seams
from tests.record_seams import digests_of

pytest.importorskip("sglang")

SERVING = Path(engine_version.__file__).parent
FILES = sorted(SERVING.rglob("*.py"))


@cache
def installed() -> EngineSource:
    return EngineSource.installed()


def test_the_installed_version_will_do() -> None:
    digests = engine_version.recorded()[1]
    assert engine_version.moved(installed(), digests) == []
    seams_only = {name: digest for name, digest in digests.items() if not name.endswith(".py")}
    assert engine_version.moved(installed(), seams_only) == []


def test_the_record_is_fresh() -> None:
    """A change of the table needs: python -m tests.record_seams."""
    digests = digests_of(installed())
    assert engine_version.recorded() == (SUPPORTED_VERSION, digests)


def test_a_seam_is_named_once() -> None:
    assert len({seam.path for seam in seams()}) == len(seams())


# -- whatever we use of SGLang is in the table -------------------------------------------------


def running(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield every node below ``tree`` but those under ``TYPE_CHECKING``, which never run."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield node
            yield from running(node)


def is_module(name: str) -> bool:
    return name == "sglang" or installed().module(name) is not None


def imported(path: Path) -> set[str]:
    """Return every name that a file imports from SGLang, or takes from a module of it."""
    nodes = list(running(ast.parse(path.read_text())))
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    names = {name: full for name, full in names.items() if full.split(".")[0] == "sglang"}
    modules = {name: full for name, full in names.items() if is_module(full)}
    return {full for full in names.values() if not is_module(full)} | {
        f"{modules[node.value.id]}.{node.attr}"
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
    }


def hooked(path: Path) -> set[str]:
    """Return every function that a file wraps."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    texts = {
        target.id: node.value.value
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return {
        eval(compile(ast.Expression(node.args[0]), "", "eval"), {}, texts)
        for node in nodes
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).removeprefix("hooks.") in ("around", "after")
    }


def is_in_table(name: str) -> bool:
    return any(f"{seam.path}.".startswith(f"{name}.") for seam in seams())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SERVING)))
def test_what_a_file_imports_from_sglang_is_in_the_table(path: Path) -> None:
    assert {name for name in imported(path) if not is_in_table(name)} == set()


def test_what_is_wrapped_is_in_the_table() -> None:
    wrapped = {target for path in FILES for target in hooked(path)}
    assert len(wrapped) > 5
    assert wrapped <= {seam.path for seam in seams()}


def strings_in(path: Path) -> set[str]:
    """Return every string in a file that names something in SGLang by its dotted path."""
    strings = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            parts = node.value.split(".")
            if parts[0] == "sglang" and len(parts) > 2 and all(p.isidentifier() for p in parts):
                strings.add(node.value)
    return strings


def test_what_is_named_by_its_path_is_in_the_table() -> None:
    names = {name for path in FILES for name in strings_in(path)}
    assert {name for name in names if not is_in_table(name)} == set()


def test_no_engine_code_reads_the_raw_backend_name() -> None:
    """Raw input keeps "indexcache"; whoever compared that with "dsa" would miss us."""
    base = Path(str(installed().root)) / "srt"
    readers = []
    for path in base.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "server_args.attention_backend" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in ("attention_backend", "prefill_attention_backend")
                and isinstance(node.value, ast.Name)
                and node.value.id == "server_args"
            ):
                readers.append(f"{path.relative_to(base)}:{node.lineno}")
    assert readers == []
