"""Names that a stranger imports: lazy, typed, complete."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import sglang_indexcache

SOURCE = Path(sglang_indexcache.__file__)


def loaded_by(code: str) -> set[str]:
    """Modules that a fresh interpreter has after ``code`` and had not before it."""
    program = f"import json, sys; before = set(sys.modules)\n{code}\n"
    program += "print(json.dumps(sorted(set(sys.modules) - before)))"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return set(json.loads(process.stdout))


def test_the_import_loads_nothing_else() -> None:
    packages = {name.split(".")[0] for name in loaded_by("import sglang_indexcache")}
    assert packages - set(sys.stdlib_module_names) == {"sglang_indexcache"}
    assert "sglang_indexcache.pattern" not in loaded_by("import sglang_indexcache")


@pytest.mark.parametrize("name", sglang_indexcache.__all__)
def test_every_public_name_is_there(name: str) -> None:
    value = getattr(sglang_indexcache, name)
    assert value.__name__ == name
    assert value.__doc__
    assert f"`{name}`" in (sglang_indexcache.__doc__ or "")
    assert name in dir(sglang_indexcache)


def test_the_types_are_those_of_the_table() -> None:
    """Type checkers read imports, not the table."""
    [block] = [node for node in ast.parse(SOURCE.read_text()).body if isinstance(node, ast.If)]
    public = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == alias.asname  # the form that says: this is public
    }
    assert public == {n: f"sglang_indexcache.{m}" for n, m in sglang_indexcache._MODULES.items()}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        getattr(sglang_indexcache, "Engine")  # noqa: B009
    with pytest.raises(ImportError, match="cannot import name 'Engine'"):
        exec("from sglang_indexcache import Engine")


@pytest.mark.parametrize("name", ["Checkpoint", "Client", "Library", "Pattern", "share"])
def test_light_names_load_neither_torch_nor_sglang(name: str) -> None:
    modules = loaded_by(f"from sglang_indexcache import {name}")
    assert not modules & {"torch", "numpy", "transformers", "sglang"}


def test_the_package_says_that_it_is_typed() -> None:
    assert (SOURCE.parent / "py.typed").exists()
