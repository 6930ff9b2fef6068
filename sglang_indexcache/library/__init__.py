"""The pattern library: its files, and the one parser of whatever a user writes for a pattern."""

from sglang_indexcache.library.files import (
    NOT_EVALUATED,
    Citation,
    Entry,
    Evaluated,
    FoundOverlap,
    Latency,
    MethodRecord,
    ModelInfo,
    Quality,
    Strict,
    add_evaluated,
    beyond_chance,
    load_entry,
    mean_known,
    names,
    set_overlap,
)
from sglang_indexcache.library.resolve import LIBRARY_VARIABLE, Library, Resolved, names_a_file

__all__ = [
    "LIBRARY_VARIABLE",
    "NOT_EVALUATED",
    "Citation",
    "Entry",
    "Evaluated",
    "FoundOverlap",
    "Latency",
    "Library",
    "MethodRecord",
    "ModelInfo",
    "Quality",
    "Resolved",
    "Strict",
    "add_evaluated",
    "beyond_chance",
    "load_entry",
    "mean_known",
    "names",
    "names_a_file",
    "set_overlap",
]
