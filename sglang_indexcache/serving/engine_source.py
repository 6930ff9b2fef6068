"""SGLang's source, installed, in a folder or in a wheel: read, and never imported.

So what we rely on can be looked at in the launcher before a model is touched, and in a release
that is not installed.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from sglang_indexcache.errors import UnsupportedEngineError
from sglang_indexcache.serving.seams import SUPPORTED_VERSION, Seam

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


class EngineSource:
    """One SGLang.

    Attributes:
        root: its folder ``sglang/``, on disk or in a wheel.
        version: its release, or None where nothing says it (a checkout).
    """

    def __init__(self, root: Path | zipfile.Path, version: str | None) -> None:
        self.root = root
        self.version = version
        self._modules: dict[str, ast.Module | None] = {}

    @classmethod
    def installed(cls) -> EngineSource:
        """The one that this Python imports.

        Raises:
            UnsupportedEngineError: there is none.
        """
        spec = importlib.util.find_spec("sglang")
        if spec is None or spec.origin is None:
            raise UnsupportedEngineError(
                f"SGLang is not installed. Install it: pip install 'sglang=={SUPPORTED_VERSION}'."
            )
        return cls(Path(spec.origin).parent, _version(sys.path))

    @classmethod
    def at(cls, place: Path) -> EngineSource:
        """The one in a wheel, or in a folder: ``sglang/``, what holds it, or a checkout.

        Raises:
            UnsupportedEngineError: there is none.
        """
        for holder in _holders(place.resolve()):
            if (holder / "sglang" / "srt" / "server_args.py").is_file():
                return cls(holder / "sglang", _version([str(holder).rstrip("/")]))
        raise UnsupportedEngineError(
            f"there is no SGLang in {place}. Name a wheel (pip download --no-deps sglang==VERSION "
            "fetches one) or a folder that holds sglang/, such as site-packages or a checkout's "
            "python/."
        )

    @property
    def name(self) -> str:
        """What to call it in a sentence."""
        return f"SGLang {self.version}" if self.version else f"the SGLang in {self.root}"

    def has_module(self, seam: Seam) -> bool:
        """Whether the seam's module is there."""
        return self._module(seam.module) is not None

    def parameters(self, seam: Seam) -> set[str] | None:
        """Names of the function's parameters; None if the seam is no function."""
        for node in self._definitions(seam):
            if isinstance(node, _FUNCTION):
                every = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                return {argument.arg for argument in every}
        return None

    def digest(self, seam: Seam) -> str | None:
        """Digest of what we rely on there, whatever its format and comments; None if gone."""
        nodes: list[ast.AST] = [*self._definitions(seam)]
        if not nodes:
            return None
        if seam.by_signature:
            nodes = [node.args for node in nodes if isinstance(node, _FUNCTION)]
        form = [_canonical(node) for node in nodes]
        return hashlib.sha256(json.dumps(form).encode()).hexdigest()[:16]

    def _definitions(self, seam: Seam) -> list[ast.stmt]:
        module = self._module(seam.module)
        return _find(module, seam.name.split(".")) if module else []

    def _module(self, name: str) -> ast.Module | None:
        """The tree of a module, or None if there is none of this name."""
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def _read(self, name: str) -> ast.Module | None:
        inside = name.split(".")[1:]
        for candidate in ("/".join(inside) + ".py", "/".join([*inside, "__init__.py"])):
            if (file := self.root / candidate).is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None


def _holders(place: Path) -> Sequence[Path | zipfile.Path]:
    """Where the folder ``sglang/`` may lie."""
    if zipfile.is_zipfile(place):
        return [zipfile.Path(place)]
    return [place, place / "python", *([place.parent] if place.name == "sglang" else [])]


def _version(places: list[str]) -> str | None:
    """What its ``.dist-info`` says; none is beside a checkout."""
    found = importlib.metadata.distributions(name="sglang", path=places)
    return next((distribution.version for distribution in found), None)


def _find(tree: ast.AST, names: list[str]) -> list[ast.stmt]:
    """Every definition, assignment or import of dotted ``names`` below ``tree``.

    Two branches may define the same name.
    """
    found = [defined for node in _statements(tree) if (defined := _defining(node, names[0]))]
    if len(names) == 1:
        return found
    return [inner for node in found for inner in _find(node, names[1:])]


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Statements of a module or class body, also those inside ``if`` and ``try``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
            yield from _statements(node)
        else:
            yield node


def _defining(node: ast.AST, name: str) -> ast.stmt | None:
    """``node`` if it defines ``name``; of an import, only what concerns ``name``."""
    if isinstance(node, (*_FUNCTION, ast.ClassDef)):
        return node if node.name == name else None
    if isinstance(node, ast.Assign):
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        return node if name in names else None
    if isinstance(node, ast.AnnAssign):
        return node if isinstance(node.target, ast.Name) and node.target.id == name else None
    if isinstance(node, ast.ImportFrom):  # replaced where it is used, not where it is from
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                return ast.copy_location(ast.ImportFrom(node.module, [alias], node.level), alias)
    return None


def _canonical(node: object) -> object:
    """A syntax tree as JSON: the same for every Python, layout, comment and docstring."""
    if isinstance(node, ast.Constant):
        return ascii(node.value)
    if isinstance(node, ast.AST):
        fields = {
            name: _canonical(value)
            for name, value in ast.iter_fields(node)
            if name not in ("ctx", "kind", "type_comment") and value is not None and value != []
        }
        return [type(node).__name__, fields]
    if isinstance(node, list):
        return [_canonical(item) for item in node if not _is_docstring(item)]
    return node


def _is_docstring(node: object) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
