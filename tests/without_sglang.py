"""A plugin of pytest: where SGLang is not installed, skip the tests that import it.

So ``make test-fast`` runs whatever a small installation can, and no list has to be kept. Only
``serving/`` imports SGLang or a package that comes with it. A missing import anywhere else is a
defect, and fails.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sglang_indexcache"
IMPORTERS = (PACKAGE / "serving", ROOT / "tests")


def missing(error: BaseException | None) -> str | None:
    """Return the package that a small installation may lack, and by which ``error`` came about."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    package = error.name.partition(".")[0]
    frames = traceback.extract_tb(error.__traceback__)
    files = [Path(frame.filename) for frame in frames]
    importer = next((file for file in reversed(files) if file.is_relative_to(ROOT)), ROOT)
    is_excused = any(importer.is_relative_to(place) for place in IMPORTERS)
    has_sglang = find_spec("sglang") is not None
    return package if not has_sglang and is_excused and find_spec(package) is None else None


class Module(pytest.Module):
    """A file of tests, which is skipped if its import lacks such a package."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            if package := missing(error.__cause__):
                pytest.skip(f"{package} is not installed", allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    """Collect the files of tests as above."""
    return Module.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip a test that lacks such a package only when it runs."""
    try:
        return (yield)
    except ModuleNotFoundError as error:
        if package := missing(error):
            pytest.skip(f"{package} is not installed")
        raise


pytest_runtest_setup = pytest_runtest_call  # and its fixtures
