"""All of these tests draw: ``make soak`` repeats them."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _draws(seed: int) -> None:
    """The run's seed, which ``tests/conftest.py`` has given to the generators."""
