"""Errors that a user can cause; each names the cause and the fix."""


class IndexCacheError(ValueError):
    """Base of every error that this package raises on bad input."""


class PatternError(IndexCacheError):
    """A pattern that is malformed, or that does not fit the model it is for."""


class LibraryError(IndexCacheError):
    """A pattern file that cannot be read, or a name that no pattern file carries."""


class CheckpointError(IndexCacheError):
    """A model that has no lightning indexer, or whose config cannot be understood."""


class SettingsError(IndexCacheError):
    """Flags, environment and config that contradict each other."""


class OutputError(IndexCacheError):
    """A folder that a command cannot write its results to."""


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
    """A server that did not start, or an answer that is not what was asked for."""


class ServerUnavailableError(ServerError):
    """A server that is away, loading or too slow: the same request may be answered later."""


class BenchError(IndexCacheError):
    """A benchmark that cannot be run as asked, or whose measurement does not hold."""


class QualityError(IndexCacheError):
    """Outcomes or tasks of a quality evaluation that cannot be made or judged as asked."""


class StaleIndexError(RuntimeError):
    """A shared layer asked for indices that its full layer has not written in this forward.

    Never caused by input: it means that a forward ran its layers out of order, or that a buffer
    was not reset. Serving wrong indices silently would be worse than stopping.
    """
