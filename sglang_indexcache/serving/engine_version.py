"""Check that this SGLang can be extended, by the code that we rely on and not by its version.

``seams.yaml`` names every internal of SGLang that we rely on, and ``seams.json`` holds a digest of
each in the version that was tested. Another version with the same digests is accepted. The source
is read and never imported. A file that equals the tested one byte for byte is not even parsed,
because parsing all files would add two seconds to every start. ``python -m tests.record_seams``, in
a clone, records the installed version.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from sglang_indexcache import __version__
from sglang_indexcache.errors import UnsupportedEngineError

logger = logging.getLogger(__name__)

SUPPORTED_VERSION = __version__.partition(".post")[0]

TABLE = Path(__file__).with_name("seams.yaml")
RECORDS = Path(__file__).with_name("seams.json")
"""File with ``{version: {seam or file: digest}}`` for the one version that was tested."""

_NAMED = 5
"""Largest number of changed seams that an error names."""


@dataclass(frozen=True)
class Seam:
    """A name in SGLang that we hook, subclass, call or set.

    ``name`` is a function, ``Class``, ``Class.method`` or a module-level name. If ``by_signature``
    is set, only its parameters matter to us, and its body may change.
    """

    module: str
    name: str
    why: str
    by_signature: bool = False

    @property
    def path(self) -> str:
        """Full dotted name, ``module.name``."""
        return f"{self.module}.{self.name}"


@cache
def seams() -> tuple[Seam, ...]:
    """Return the seams of :data:`TABLE`."""
    parts = yaml.safe_load(TABLE.read_text(encoding="utf-8")).values()
    modules = [module for part in parts for module in part.items()]
    return tuple(
        Seam(module, owner + name, why, by_signature=names.startswith("def "))
        for module, inside in modules
        for owner, names, why in _rows(inside)
        for name in names.removeprefix("def ").split(", ")
    )


def _rows(inside: Mapping[str, str | Mapping[str, str]]) -> Iterator[tuple[str, str, str]]:
    """Yield the owner (with a dot), names and reason of each seam in a module and its classes."""
    for name, reasons in inside.items():
        if isinstance(reasons, str):
            yield "", name, reasons
        else:
            yield from ((f"{name}.", member, why) for member, why in reasons.items())


def recorded() -> tuple[str, dict[str, str]]:
    """Return the version that was tested, and its digests."""
    [(version, digests)] = json.loads(RECORDS.read_text(encoding="utf-8")).items()
    return version, digests


def check(source: EngineSource | None = None) -> None:
    """Refuse an SGLang in which a seam changed; warn of another version that was not tested.

    Raises:
        UnsupportedEngineError: names the seams that changed.
    """
    source = source or EngineSource.installed()
    tested, digests = recorded()
    if problems := moved(source, digests):
        listed = problems[:_NAMED]
        if more := len(problems) - len(listed):
            listed.append(f"and {more} more")
        verdict, force = f"this {source.name} is not the one that was tested", "--force-reinstall "
        if source.version != tested:
            verdict, force = f"{source.name} was not tested", ""
        raise UnsupportedEngineError(
            f"{verdict}, and of the {len(seams())} places in it that IndexCache relies on "
            f"{len(problems)} differ from {tested}: {'; '.join(listed)}. Install the tested one: "
            f"pip install {force}'sglang=={tested}'."
        )
    if source.version != tested:
        logger.warning(
            "IndexCache: %s was not tested; everything that IndexCache relies on is as in %s",
            source.name,
            tested,
        )


def moved(source: EngineSource, digests: Mapping[str, str]) -> list[str]:
    """Return a sentence for each seam of ``source`` that differs from the record."""
    problems = []
    for seam in seams():
        recorded_digest = digests.get(seam.path)
        is_tested = recorded_digest and source.has_file(seam.module, digests)
        digest = recorded_digest if is_tested else source.digest(seam)
        if digest is None:
            problems.append(f"{seam.path} is gone")
        elif recorded_digest is None:
            problems.append(f"{seam.path} is not recorded (python -m tests.record_seams)")
        elif digest != recorded_digest:
            problems.append(f"{seam.path} has changed")
    return problems


_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


class EngineSource:
    """Source of one SGLang: its folder ``sglang/``, and its version, or None if unknown."""

    def __init__(self, root: Path, version: str | None) -> None:
        self.root = root
        self.version = version
        self.file, self.module = cache(self._file), cache(self._module)

    @classmethod
    def installed(cls) -> EngineSource:
        """Return the SGLang that this Python imports.

        Raises:
            UnsupportedEngineError: SGLang is not installed.
        """
        spec = importlib.util.find_spec("sglang")
        if spec is None or spec.origin is None:
            raise UnsupportedEngineError(
                f"SGLang is not installed. Install it: pip install 'sglang=={SUPPORTED_VERSION}'."
            )
        distributions = importlib.metadata.distributions(name="sglang")
        return cls(
            Path(spec.origin).parent,
            next((distribution.version for distribution in distributions), None),
        )

    @property
    def name(self) -> str:
        """Name of this SGLang for a sentence."""
        return f"SGLang {self.version}" if self.version else f"the SGLang in {self.root}"

    def digest(self, seam: Seam) -> str | None:
        """Return the digest of a seam, independent of layout and comments; None if it is gone."""
        module = self.module(seam.module)
        nodes: list[ast.AST] = [*_find(module, seam.name.split("."))] if module else []
        if not nodes:
            return None
        if seam.by_signature:
            nodes = [node.args for node in nodes if isinstance(node, _FUNCTION)]
        form = [_canonical(node) for node in nodes]
        return hashlib.sha256(json.dumps(form).encode()).hexdigest()[:16]

    def _module(self, name: str) -> ast.Module | None:
        """Return the syntax tree of a module, or None if there is no such module."""
        path = self._find_file(name)
        return ast.parse(path.read_text(encoding="utf-8")) if path else None

    def has_file(self, module: str, digests: Mapping[str, str]) -> bool:
        """Return whether the module's file has the digest that ``digests`` lists for it."""
        file = self.file(module)
        return file is not None and digests.get(file[0]) == file[1]

    def _file(self, module: str) -> tuple[str, str] | None:
        """Return the path of a module's file below ``root``, and its digest; None if it is gone."""
        if (path := self._find_file(module)) is None:
            return None
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        return path.relative_to(self.root).as_posix(), digest

    def _find_file(self, module: str) -> Path | None:
        path = self.root.joinpath(*module.split(".")[1:])
        files = [path.with_name(f"{path.name}.py"), path / "__init__.py"]
        return next((file for file in files if file.is_file()), None)


def _find(tree: ast.AST, names: list[str]) -> list[ast.stmt]:
    """Return every definition, assignment or import of the dotted ``names`` below ``tree``.

    There may be several, because two branches may define the same name.
    """
    definitions = [defined for node in _statements(tree) if (defined := _defining(node, names[0]))]
    if len(names) == 1:
        return definitions
    return [inner for node in definitions for inner in _find(node, names[1:])]


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a module or class body, including those inside ``if`` and ``try``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
            yield from _statements(node)
        else:
            yield node


def _defining(node: ast.AST, name: str) -> ast.stmt | None:
    """Return ``node`` if it defines ``name``; of an import, return only the part for ``name``."""
    if isinstance(node, (*_FUNCTION, ast.ClassDef)):
        return node if node.name == name else None
    if isinstance(node, ast.Assign):
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        return node if name in names else None
    if isinstance(node, ast.AnnAssign):
        return node if isinstance(node.target, ast.Name) and node.target.id == name else None
    if isinstance(node, ast.ImportFrom):  # a name may be hooked where it is imported
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                return ast.copy_location(ast.ImportFrom(node.module, [alias], node.level), alias)
    return None


def _canonical(node: object) -> object:
    """Return a syntax tree as JSON, independent of Python, layout, comments and docstrings."""
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
    constant = node.value if isinstance(node, ast.Expr) else None
    return isinstance(constant, ast.Constant) and isinstance(constant.value, str)
