"""``python -m sglang_indexcache.cli``, for launchers that want a module."""

from sglang_indexcache.cli import app

app()
