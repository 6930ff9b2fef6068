"""Errors that a user can cause; each names the cause and the fix."""

from __future__ import annotations

from types import TracebackType

_MOST_QUOTED = 100


def quoted(text: str) -> str:
    """Quote a user's text, shortened so that it does not drown the sentence around it."""
    if len(text) <= _MOST_QUOTED:
        return repr(text)
    return f"{text[:_MOST_QUOTED]!r} and {len(text) - _MOST_QUOTED:,} characters more"


class IndexCacheError(ValueError):
    """Base of every error that this package raises on bad input."""


class CombinedError(IndexCacheError):
    """More than one problem with the same input."""

    def __init__(self, each: tuple[IndexCacheError, ...]) -> None:
        super().__init__(" ".join(map(str, each)))
        self.each = each


class Findings:
    """Collector of problems, so that a user is told all of them at once.

    Each check runs in a block of its own, ``with findings:``, which ends at its first problem.
    """

    def __init__(self) -> None:
        self.each: list[IndexCacheError] = []

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, _kind: type | None, error: BaseException | None, _trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, IndexCacheError):
            return False
        self.each += error.each if isinstance(error, CombinedError) else (error,)
        return True

    def report(self) -> None:
        """Raise the problems that were collected.

        Raises:
            IndexCacheError: the problem itself if there is only one, else :class:`CombinedError`.
        """
        if len(self.each) > 1:
            raise CombinedError(tuple(self.each))
        if self.each:
            raise self.each[0]


class PatternError(IndexCacheError):
    """A pattern that is malformed, or that does not fit the model it is for."""


class LibraryError(IndexCacheError):
    """A pattern file that cannot be read, or a name that no pattern file carries."""


class CheckpointError(IndexCacheError):
    """A model that has no lightning indexer, or whose config cannot be understood."""


class SettingsError(IndexCacheError):
    """Flags, environment and config that contradict each other."""


class OutputError(IndexCacheError):
    """A folder or file that a command cannot write its results to."""


class DataError(IndexCacheError):
    """Files of documents that cannot be read, or turned into tokens."""


class SearchError(IndexCacheError):
    """A pattern search that cannot start or go on: data, targets, constraints or journal."""


class UnsupportedEngineError(IndexCacheError):
    """The installed SGLang is not one that this package knows how to extend."""


class TrainingError(IndexCacheError):
    """A recipe, data or model that cannot be trained as asked."""


class KernelError(IndexCacheError):
    """A kernel that cannot be built or run here, or that was given the wrong tensors."""


class ServerError(IndexCacheError):
    """A server that did not start, or an answer that does not fit the request."""


class ServerUnavailableError(ServerError):
    """A server that is unreachable, loading or too slow: the same request may succeed later."""


class BenchError(IndexCacheError):
    """A benchmark that cannot be run as asked, or whose measurement does not hold."""


class QualityError(IndexCacheError):
    """Outcomes or tasks of a quality evaluation that cannot be made or judged as asked."""


class StaleIndexError(RuntimeError):
    """A shared layer asked for indices that its full layer has not written in this forward.

    Never caused by input: it means that a forward ran its layers out of order, or that a buffer
    was not reset. Serving wrong indices silently would be worse than stopping.
    """
