"""The pattern library: its files, and the one parser of what a user writes."""

from sglang_indexcache.library.files import (
    NOT_EVALUATED,
    Citation,
    Entry,
    Evaluated,
    Latency,
    MethodRecord,
    ModelInfo,
    Quality,
    Strict,
    add_evaluated,
    entry_name,
    load_entry,
    names,
)
from sglang_indexcache.library.resolve import (
    LIBRARY_VARIABLE,
    Library,
    Resolved,
    name_and_pattern,
    names_a_file,
)

__all__ = [
    "LIBRARY_VARIABLE",
    "NOT_EVALUATED",
    "Citation",
    "Entry",
    "Evaluated",
    "Latency",
    "Library",
    "MethodRecord",
    "ModelInfo",
    "Quality",
    "Resolved",
    "Strict",
    "add_evaluated",
    "entry_name",
    "load_entry",
    "name_and_pattern",
    "names",
    "names_a_file",
]
