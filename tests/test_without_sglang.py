"""Tests that are skipped in an installation without SGLang, and those that fail there."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests import without_sglang
from tests.without_sglang import ROOT, missing

ABSENT = {"sglang", "nosuchpackage"}


def failed(text: str, place: str) -> ModuleNotFoundError:
    """Return the error of importing what is not there, in a file of this repository."""
    with pytest.raises(ModuleNotFoundError) as caught:
        exec(compile(text, str(ROOT / place), "exec"), {})
    return caught.value


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this an installation without SGLang."""
    monkeypatch.setattr(
        without_sglang, "find_spec", lambda name: None if name in ABSENT else find_spec(name)
    )


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "place", ["sglang_indexcache/serving/http_checks.py", "tests/lab/client/test_x.py"]
)
def test_what_comes_with_sglang_may_be_missing_where_it_may_be_imported(place: str) -> None:
    assert missing(failed("import nosuchpackage.inner", place)) == "nosuchpackage"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("place", ["sglang_indexcache/lab/search/run.py", "benchmarks/records.py"])
def test_elsewhere_a_missing_import_is_a_defect(place: str) -> None:
    assert missing(failed("import nosuchpackage", place)) is None


@pytest.mark.usefixtures("small")
def test_a_module_of_ours_that_is_not_there_is_a_defect() -> None:
    assert missing(failed("import tests.nosuchfile", "tests/lab/client/test_x.py")) is None


@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_with_sglang_nothing_may_be_missing() -> None:
    assert missing(failed("import nosuchpackage", "tests/lab/client/test_x.py")) is None


def test_files_are_collected_by_the_plugin(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.pluginmanager.has_plugin("tests.without_sglang")
