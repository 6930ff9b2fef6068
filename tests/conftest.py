"""Which tests need what a small installation lacks is said here alone; there they are skipped.

Whoever is not listed must pass without it: ``make test-fast`` shows an import that fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
NEEDS = {
    "sglang": (
        "e2e",
        "kernels/test_references.py",
        "serving/cpu",
        "serving/cuda/test_backend.py",
        "serving/cuda/test_capture.py",
        "serving/cuda/test_kernels.py",
        "serving/test_adapter.py",
        "serving/test_config_check.py",
        "serving/test_agreement.py",
        "serving/test_foreign_kv.py",
        "serving/test_hooks.py",
        "serving/test_live.py",
        "serving/test_plugin.py",
        "serving/test_refusals.py",
        "serving/test_requests.py",
        "serving/test_seams.py",
        "serving/test_settings.py",
    ),
    # It is for Linux only.
    "triton": (
        "kernels/test_triton.py",
        "kernels/test_triton_compiles.py",
        "training/test_losses_triton.py",
    ),
}


class SkippedModule(pytest.Module):
    """A test file that is not even imported."""

    missing = ""

    def collect(self) -> Iterator[pytest.Item]:
        raise pytest.skip.Exception(
            f"{self.missing} is missing: pip install 'sglang-indexcache[serve]'",
            allow_module_level=True,
        )


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Any:
    """Stand in for a module that needs a package which is not there."""
    for package, places in NEEDS.items():
        needed = any(module_path.is_relative_to(TESTS / place) for place in places)
        if needed and find_spec(package) is None:
            module = SkippedModule.from_parent(parent, path=module_path)
            module.missing = package
            return module
    return None
