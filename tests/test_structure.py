"""The dependency direction of the design, read from the imports."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "sglang_indexcache"
MODULES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def inner(path: Path) -> set[str]:
    """Modules of this package that a file imports, without the package's name."""
    return {
        name.removeprefix("sglang_indexcache.")
        for name in imports(path)
        if name.startswith("sglang_indexcache.")
    }


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_runtime_imports_sglang(path: Path) -> None:
    uses_engine = any(name == "sglang" or name.startswith("sglang.") for name in imports(path))
    assert not uses_engine or path.parent.name == "runtime"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_below_runtime_depends_on_it(path: Path) -> None:
    if path.parent.name == "runtime" or path.name == "cli.py":
        return
    assert not any(name.split(".")[0] == "runtime" for name in inner(path))


def test_pattern_is_at_the_bottom() -> None:
    assert inner(PACKAGE / "pattern.py") <= {"errors", "errors.PatternError"}
    assert "torch" not in imports(PACKAGE / "pattern.py")


def test_library_needs_no_torch() -> None:
    for name in ("library.py", "checkpoint.py", "cli.py"):
        assert not {"torch", "transformers"} & imports(PACKAGE / name)


def test_kernels_need_torch_only() -> None:
    for path in (PACKAGE / "kernels").rglob("*.py"):
        assert all(name.split(".")[0] in {"kernels", "errors"} for name in inner(path)), path
