"""The pattern library: its files, those of slopes, and the one parser of what a user writes."""

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
from sglang_indexcache.library.slopes import LayerSlopes, Slopes

__all__ = [
    "LIBRARY_VARIABLE",
    "NOT_EVALUATED",
    "Citation",
    "Entry",
    "Evaluated",
    "Latency",
    "LayerSlopes",
    "Library",
    "MethodRecord",
    "ModelInfo",
    "Quality",
    "Resolved",
    "Slopes",
    "Strict",
    "add_evaluated",
    "entry_name",
    "load_entry",
    "name_and_pattern",
    "names",
    "names_a_file",
]
