"""What ends a benchmark without a result."""

from sglang_indexcache.errors import IndexCacheError


class BenchError(IndexCacheError):
    """A benchmark that cannot start, or a server that did not do what was asked of it."""
