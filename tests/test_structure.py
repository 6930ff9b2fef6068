"""The dependency direction of the design, read from the imports: what each package may reach.

Imports are followed to the end, also those inside functions; only those under ``TYPE_CHECKING``
do not count, because they never run.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "sglang_indexcache"
NAME = PACKAGE.name

BASE = {"errors", "pattern", "models", "checkpoint", "library", "support.files", "support.lengths"}
SMALL = {"pydantic", "yaml"}
"""What the base of the package needs; the standard library is not listed."""
TABLES = {"rich"}
TORCH = {"torch", "numpy"}
CUDA_BUILD = {"tvm_ffi", "filelock", "triton"}
MODELS = TORCH | {"transformers", "tokenizers", "safetensors"}

# A package, or a module: what of ours it may reach, and what of others.
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    "errors": (set(), set()),
    "pattern": ({"errors"}, set()),
    "models": (set(), set()),
    "checkpoint": ({"errors", "models", "pattern"}, set()),
    "library": (BASE, SMALL),
    "stored": (BASE, SMALL | MODELS),
    "adapter": (BASE | {"study.provenance"}, SMALL | MODELS),
    "ask": (BASE, SMALL | {"httpx"}),
    "recent": (set(), {"torch"}),
    "fold": ({"errors", "models"}, {"torch"}),
    "hf": (BASE | {"recent"}, SMALL | {"torch"}),
    "support": (BASE, TABLES | {"scipy", "tokenizers", "transformers"}),
    "study": (BASE, TABLES | {"matplotlib"}),
    "kernels": ({"errors", "recent", "support.files"}, TORCH | CUDA_BUILD),
    "data": ({"errors", "support.text"}, TORCH | {"pyarrow", "tokenizers", "transformers"}),
    "search": (
        BASE | {"ask", "data", "hf", "recent", "stats", "study", "support"},
        SMALL | MODELS | TABLES | {"httpx", "scipy", "matplotlib", "pyarrow"},
    ),
    "heal": (
        BASE | {"adapter", "data", "recent", "stats", "stored", "study", "support"},
        SMALL | MODELS | TABLES | {"accelerate", "matplotlib", "pyarrow", "scipy", "triton"},
    ),
    "heal.losses": (
        {"errors", "heal.packing"},
        {"torch"},
    ),
    "stats": ({"errors"}, {"numpy", "scipy"}),
    "evaluate": (
        BASE | {"ask", "data", "stats", "study", "support"},
        SMALL
        | TABLES
        | {"httpx", "jinja2", "numpy", "pyarrow", "scipy", "transformers", "tokenizers"},
    ),
    "bench": (
        BASE | {"ask", "study", "support"},
        SMALL | TABLES | {"httpx", "matplotlib", "pyarrow"},
    ),
}
UNBOUND = ("serving", "cli", "demo")
"""Who may reach everything: what runs inside SGLang, what a user types, and what shows it all."""


def module_name(path: Path) -> str:
    """``search.run`` of ``search/run.py``; a package's is that of its folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def nodes(tree: ast.AST, *, types: bool) -> Iterator[ast.AST]:
    """Every node below ``tree``; those under ``TYPE_CHECKING``, which never run, if ``types``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not types:
            continue
        yield node
        yield from nodes(node, types=types)


@cache
def imports(module: str, *, types: bool = False) -> tuple[set[str], set[str]]:
    """``(modules of ours, packages of others)`` that a module imports, wherever in the file."""
    ours, others = set(), set()
    for node in nodes(ast.parse(PATHS[module].read_text()), types=types):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [n if n.removeprefix(f"{NAME}.") in PATHS else node.module for n in inner]
        for name in names:
            if name.split(".")[0] == NAME:
                ours.add(name.removeprefix(NAME).removeprefix("."))
            else:
                others.add(name.split(".")[0])
    return ours, others


def reached(module: str, *, types: bool = False) -> set[str]:
    """``module`` and every module of ours that importing and running it can load."""
    found, left = set(), [module]
    while left:
        name = left.pop()
        if name and name not in found:
            found.add(name)
            left += imports(name, types=types)[0]
    return found


def is_in(module: str, places: set[str] | tuple[str, ...]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_reaches_only_what_it_may(package: str) -> None:
    ours, others = ALLOWED[package]
    for module in PATHS:
        if not is_in(module, {package}) or is_in(module, UNBOUND):
            continue
        for name in reached(module):
            assert is_in(name, ours | {package}), f"{module} reaches {name}"
            foreign = imports(name)[1] - set(sys.stdlib_module_names)
            assert foreign <= others, f"{module} reaches {foreign - others} by {name}"


def test_every_module_has_a_row() -> None:
    rows = {*ALLOWED, *UNBOUND}
    assert [module for module in PATHS if module and not is_in(module, tuple(rows))] == []


def test_no_module_reaches_itself() -> None:
    def circle(module: str) -> list[str]:
        ours, _ = imports(module, types=True)
        return [name for name in ours if name and module in reached(name, types=True)]

    assert {module: found for module in PATHS if (found := circle(module))} == {}


def test_a_class_name_stands_for_one_thing() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module, path in PATHS.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


RULES = {
    "ask.protocol": ("alike", "check_answered_under", "check_obeyed", "disobedient"),
    "ask.score": ("time_allowed", "_LEAST_SECONDS", "_LEAST_RATE"),
    "ask.pool": ("FIRST_PAUSE", "LONGEST_PAUSE"),
    "data.marking": ("is_held_out",),
    "data.rows": ("read_rows",),
    "stats.bounds": ("half_width", "student_quantile"),
    "study.cost": ("confirm", "print_plan"),
    "study.journal": ("check_same", "claim", "differences"),
    "study.provenance": ("busy_cores", "checkpoint_digest", "machine", "versions"),
    "support.files": ("check_writable", "write_whole"),
}
"""Rules that several folders follow, and where each is: once there was a copy in every folder."""


def test_a_shared_rule_is_defined_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module, path in PATHS.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                places[node.name].append(module)
            for one in ast.walk(node) if isinstance(node, ast.Assign) else ():
                if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                    places[one.id].append(module)
    wanted = {name: [module] for module, names in RULES.items() for name in names}
    assert {name: places[name] for name in wanted} == wanted
