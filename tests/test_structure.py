"""Structure of the package: walls between packages, no circles, one name and one rule a thing.

The walls themselves are contracts in pyproject.toml, which ``lint-imports`` reads.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sglang_indexcache"


def module_name(path: Path) -> str:
    """Return ``lab.search.run`` for ``lab/search/run.py``; a package's is that of its folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def test_the_contracts_of_imports_are_kept() -> None:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr


def test_no_module_reaches_itself() -> None:
    """Imports under ``TYPE_CHECKING`` count here."""
    graph = grimp.build_graph(PACKAGE.name, cache_dir=None)
    for name in graph.find_modules_directly_imported_by(PACKAGE.name):  # lazily, for others
        graph.remove_import(importer=PACKAGE.name, imported=name)
    circles = [
        (module, name)
        for module in graph.modules
        for name in graph.find_modules_directly_imported_by(module)
        if graph.chain_exists(importer=name, imported=module)
    ]
    assert circles == []


def test_a_class_name_stands_for_one_thing() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module, path in PATHS.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


VOICED = ("sglang_indexcache", "benchmarks", "examples", "tests")
CLIPPED = {"As", "By", "How", "Of", "On", "That"}
CLIPPED |= {"What", "Where", "Which", "Whose", "Why", "With", "Without"}
"""Words with which a docstring would begin that says neither what it names nor what it does."""


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    """Ruff's D401 reads functions alone, not properties, and none of the tests."""
    clipped = []
    for path in sorted(path for folder in VOICED for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                words = (ast.get_docstring(node) or "-").split(maxsplit=1)
                if words[0] in CLIPPED:
                    clipped.append(f"{path.relative_to(ROOT)}: {' '.join(words)[:60]}")
    assert clipped == []


NOUNS = {"All", "Each", "Every", "Everything", "Markdown", "One", "Those", "Tokens", "Whether"}


@pytest.mark.parametrize("folder", VOICED[:3])
def test_a_function_begins_with_a_verb(folder: str) -> None:
    """These nouns and shapes are what ruff's D401 took for one."""
    named = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                word = (ast.get_docstring(node) or "-").split()[0].rstrip(",.:")
                is_property = any("property" in ast.unparse(mark) for mark in node.decorator_list)
                if not is_property and (word in NOUNS or word.startswith("`")):
                    named.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {word}")
    assert named == []


VAGUE = {"asked", "done", "found", "given", "got", "kept", "known", "made", "said", "seen", "shown"}
VAGUE |= {"taken", "told", "wanted", "both", "each", "here", "one", "other", "others", "own"}
VAGUE |= {"same", "there", "way", "whole"}
"""Names that say how a value came about or which one it is, and not what it holds."""


@pytest.mark.parametrize("folder", VOICED)
def test_names_say_what_they_hold(folder: str) -> None:
    """Three in a thousand lines may be a participle or a pronoun, as ``other`` beside ``self``."""
    lines, vague = 0, []
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text()
        lines += text.count("\n")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            else:
                continue
            if name in VAGUE:
                vague.append(f"{path.relative_to(ROOT)}:{node.lineno} {name}")
    assert len(vague) <= 0.003 * lines, "\n".join(vague)


RULES = {
    "serving.client_rules": ("alike", "check_answered_under", "check_obeyed", "disobedient"),
    "lab.client.score": ("time_allowed", "_LEAST_SECONDS", "_LEAST_RATE"),
    "lab.client.pool": ("FIRST_PAUSE", "LONGEST_PAUSE"),
    "lab.data.marking": ("is_held_out",),
    "lab.data.rows": ("read_rows",),
    "lab.stats.bounds": ("half_width", "student_quantile"),
    "lab.runs.progress": ("print_plan", "time_in_words"),
    "lab.runs.identity": ("check_same", "check_writable", "claim", "differences"),
    "lab.runs.provenance": ("busy_cores", "machine", "versions"),
    "library.digest": ("checkpoint_digest",),
    "library.writing": ("write_whole",),
}
"""Rules that several folders follow, and where each is: once there was a copy in every folder."""


def test_a_shared_rule_is_defined_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module, path in PATHS.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                places[node.name].append(module)
            for name_node in ast.walk(node) if isinstance(node, ast.Assign) else ():
                if isinstance(name_node, ast.Name) and isinstance(name_node.ctx, ast.Store):
                    places[name_node.id].append(module)
    expected = {name: [module] for module, names in RULES.items() for name in names}
    assert {name: places[name] for name in expected} == expected


def test_studies_and_tests_stand_apart() -> None:
    """A study can leave without tests of the package, and none runs on what only tests have."""
    imports = re.compile(r"^\s*(?:from|import) (benchmarks|tests)\b", re.MULTILINE)
    crossing = [
        str(path.relative_to(ROOT))
        for folder, other in (("tests", "benchmarks"), ("benchmarks", "tests"))
        for path in sorted((ROOT / folder).rglob("*.py"))
        if other in imports.findall(path.read_text())
        and path.relative_to(ROOT).parts[:2] not in (("tests", "benchmarks"), ("tests", "fixtures"))
    ]
    assert crossing == []


def test_what_make_quick_runs_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (listed,) = re.findall(r"^QUICK := (.*)$", makefile, flags=re.MULTILINE)
    missing = [path for path in listed.split() if not (ROOT / path).exists()]
    assert not missing, "pytest then runs nothing at all"
