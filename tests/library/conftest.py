"""The library that is shipped."""

from __future__ import annotations

import pytest

from sglang_indexcache.library.resolve import Library


@pytest.fixture
def library() -> Library:
    return Library.default()
