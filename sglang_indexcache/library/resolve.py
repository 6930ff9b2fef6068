"""The one parser of the forms in which a user may write a pattern.

The forms are an F/S string, ``full``, ``uniform:1/4``, a ratio, a library name and a YAML path.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import LibraryError, PatternError, quoted
from sglang_indexcache.library.files import FORMS, LETTERS, Entry, is_yaml, load_entry, read_folder
from sglang_indexcache.library.writing import shipped
from sglang_indexcache.models import EXPERTS
from sglang_indexcache.pattern import Pattern

LIBRARY_VARIABLE = "SGLANG_INDEXCACHE_LIBRARY"
"""Environment variable: more folders of pattern files, separated like PATH."""

_RATIO = re.compile("([0-9]+)/([0-9]+)")
_UNIFORM = "uniform:"
_LONGEST_RATIO = 12
"""Upper limit in characters; Python refuses to parse numbers of thousands of digits."""
_LONGEST_GUESSED = 100
"""Longest name, in characters, for which similar names are suggested: the time grows with the
square of the length."""

_OFF = ("off", "none", "no", "false", "0", "all", "disable", "disabled")
"""Words that people write to mean no sharing."""


@dataclass(frozen=True)
class Resolved:
    """Pattern that a value stands for, with a description of its source."""

    pattern: Pattern
    description: str
    entry: Entry | None = None


class Library:
    """The pattern files of several folders, read once, on first use."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)

    @classmethod
    def default(cls) -> Library:
        """Open the patterns of the package, then the folders of SGLANG_INDEXCACHE_LIBRARY.

        Raises:
            LibraryError: one of these paths is not a folder.
        """
        extra = [Path(p) for p in os.environ.get(LIBRARY_VARIABLE, "").split(os.pathsep) if p]
        for folder in extra:
            if not folder.is_dir():
                raise LibraryError(
                    f"{LIBRARY_VARIABLE} names {folder}, which is no folder here. Make it, or take "
                    "it out of the variable."
                )
        return cls([shipped("patterns"), *extra])

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Every entry by name; where folders share a name, the last folder's entry wins."""
        return {name: entry for entries in self._by_folder for name, entry in entries.items()}

    @property
    def left_out(self) -> list[LibraryError]:
        """Reasons why files in the folders are not entries, by their paths."""
        return [error for _, errors in self._read for error in errors]

    @cached_property
    def digest(self) -> str:
        """Digest, twelve hex digits, of only the patterns that names and ratios stand for."""
        fields = {"name", "retention", "pattern", "model"}
        known = [
            [entry.model_dump(include=fields) for entry in entries.values()]
            for entries in self._by_folder
            if entries
        ]
        return sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def _by_folder(self) -> list[dict[str, Entry]]:
        return [entries for entries, _ in self._read]

    @cached_property
    def _read(self) -> list[tuple[dict[str, Entry], list[LibraryError]]]:
        return [read_folder(folder) for folder in self.folders]

    @property
    def _where_the_names_are(self) -> str:
        """Last part of an error about a name; without paths: a server's client may read it."""
        count = len(self.left_out)
        why = f", and says why {count} file{'s are' if count > 1 else ' is'} left out"
        return f"`indexcache patterns list` has the names{why if count else ''}."

    def get(self, name: str) -> Entry:
        """Return the entry called ``name``, or raise a LibraryError that lists the known names."""
        if name in self.entries:
            return self.entries[name]
        if "<" in name:
            raise LibraryError(
                f"one pattern is wanted here, got a choice by prompt length: {quoted(name)}. Only "
                "the pattern of a server may depend on it."
            )
        hint = " Every indexer on is called full." if name.lower() in _OFF else ""
        near = get_close_matches(name, self.entries) if len(name) <= _LONGEST_GUESSED else ()
        nearest = f" Near it: {', '.join(near)}." if near else ""
        raise LibraryError(
            f"no pattern is called {quoted(name)}.{hint}{nearest} {FORMS} "
            f"{self._where_the_names_are}"
        )

    def for_checkpoint(self, checkpoint: Checkpoint) -> list[Entry]:
        """Return the entries for ``checkpoint``'s model whose patterns fit it."""
        return [
            entry
            for entry in self.entries.values()
            if entry.model.matches(checkpoint) and _fits(entry.parsed, checkpoint)
        ]

    def resolve(
        self, value: str, checkpoint: Checkpoint | None = None, *, files: bool = True
    ) -> Resolved:
        """Turn a user's text into a pattern; only this function knows the accepted forms.

        The pattern must fit the checkpoint. Without one, only forms that name every layer can be
        resolved.

        Args:
            files: whether ``value`` may be the path of a file on this machine; not for clients of a
                server, who must not make it read files.

        Raises:
            PatternError, LibraryError: names what is wrong with ``value``.
        """
        value = value.strip()  # shells and YAML may leave spaces
        if value == "full" or value.startswith(_UNIFORM) or _RATIO.fullmatch(value):
            resolved = self._by_depth(value, checkpoint)
        else:
            resolved = self._spelled_out(value, files)
        if checkpoint is not None:
            _check_model(resolved.entry, checkpoint)
            resolved.pattern.check_checkpoint(checkpoint.own)
        return resolved

    def _by_depth(self, value: str, checkpoint: Checkpoint | None) -> Resolved:
        if checkpoint is None:
            raise PatternError(
                f"which layers {value!r} keeps depends on the model. Say which one (--model), or "
                "give an F/S string, a library name or a YAML file."
            )
        if value == "full":
            return Resolved(checkpoint.own, "every indexer that the checkpoint ships")
        if value.startswith(_UNIFORM):
            return _uniform(value, checkpoint)
        return self._by_ratio(value, checkpoint)

    def _spelled_out(self, value: str, files: bool) -> Resolved:
        if names_a_file(value):
            if not files:
                raise PatternError(
                    f"{value!r} is a file, and a server reads none for whoever can reach it. Send "
                    f"its F/S string, or start the server with {LIBRARY_VARIABLE} and send the "
                    "name."
                )
            return _from_entry(load_entry(Path(value)), f"file {value}")
        # F and S alone need no library. A text that only resembles them may be a library name.
        if not set(value) - set(LETTERS) or (_looks_literal(value) and value not in self.entries):
            return Resolved(Pattern(value), "given literally")
        return _from_entry(self.get(value), f"library entry {value}")

    def _by_ratio(self, value: str, checkpoint: Checkpoint) -> Resolved:
        above, _, below = value.partition("/")
        if len(value) > _LONGEST_RATIO or not 0 < int(above) < int(below):
            raise PatternError(
                "a ratio is the share of indexers that stay, in small numbers such as 1/4, and "
                f"full is all of them; got {quoted(value)}"
            )
        ratio = Fraction(int(above), int(below))
        matching = [
            entry for entry in self.for_checkpoint(checkpoint) if Fraction(entry.retention) == ratio
        ]
        if not matching:
            raise self._unknown_ratio(value, ratio, checkpoint)
        if len(matching) > 1:  # the user's own folders come last
            *_, user_entries = (
                matches
                for entries in self._by_folder
                if (matches := [row for row in matching if entries.get(row.name) is row])
            )
            matching = user_entries
        if len(matching) > 1:
            names = ", ".join(entry.name for entry in matching)
            raise LibraryError(f"several patterns at retention {value} fit: {names}. Name one.")
        return _from_entry(matching[0], f"library entry {matching[0].name}")

    def _unknown_ratio(self, value: str, ratio: Fraction, checkpoint: Checkpoint) -> LibraryError:
        """Return the error for a ratio that no pattern has, with the user's choices."""
        model = f"this {checkpoint.architecture} with {checkpoint.num_layers} layers"
        start = f"no pattern at retention {value} is known for {model}"
        if checkpoint.shares_already:
            return LibraryError(
                f"{start}. It shares already, as it was trained to: {checkpoint.own.summary()}. "
                "Leave the pattern out."
            )
        if pruned := [
            entry.name
            for entry in self.entries.values()
            if entry.model.matches(checkpoint, ignoring=EXPERTS)
            and Fraction(entry.retention) == ratio
        ]:
            return LibraryError(
                f"{start} and {checkpoint.shape.get(EXPERTS)} experts. {' and '.join(pruned)} is "
                "for the same layers with another number of experts: give its name, and measure "
                "quality before you serve it (indexcache eval run)."
            )
        search = f"{start}. Search one on your data (indexcache search run)"
        if ratio.numerator > 1 or ratio.denominator > checkpoint.num_layers:
            return LibraryError(f"{search}.")
        return LibraryError(
            f"{search}, or say {_UNIFORM}{ratio} to interleave blindly, which costs quality on "
            "long contexts."
        )


def names_a_file(value: str) -> bool:
    """Return whether ``value`` is written as the path of a YAML file, existing or not.

    A policy by prompt length (``full < 32K <= 1/2``) is no path, though its ratios have slashes.
    """
    value = value.strip()
    if "<" in value or value.startswith(_UNIFORM) or _RATIO.fullmatch(value):
        return False
    return is_yaml(Path(value)) or os.sep in value


def name_and_pattern(value: str) -> tuple[str, str]:
    """Split ``NAME=PATTERN``; without a name, use the pattern's text or the file's stem."""
    name, _, pattern = value.partition("=")
    if name and pattern and not os.path.exists(value):  # a path may contain "="
        return name, pattern
    return (Path(value).stem if is_yaml(Path(value)) else value), value


def names_and_patterns(values: Sequence[str]) -> list[tuple[str, str]]:
    """Split several by :func:`name_and_pattern`.

    Raises:
        PatternError: two have the same name.
    """
    named = [name_and_pattern(value) for value in values]
    names = [name for name, _ in named]
    for name in names:
        if names.count(name) > 1:
            raise PatternError(
                f"two patterns are called {name}, so that results could not tell them apart. Give "
                "each a name of its own: NAME=PATTERN."
            )
    return named


def _from_entry(entry: Entry, description: str) -> Resolved:
    return Resolved(entry.parsed, description, entry)


def _check_model(entry: Entry | None, checkpoint: Checkpoint) -> None:
    """Refuse another model's pattern by naming that model, rather than by its length."""
    if entry is not None and entry.model.num_layers != checkpoint.num_layers:
        raise PatternError(
            f"{entry.name} is for {entry.model.name}, which has {entry.model.num_layers} indexer "
            f"layers; this {checkpoint.architecture} has {checkpoint.num_layers}. Choose a pattern "
            "that was made for this model (indexcache patterns list --model FOLDER)."
        )


def _uniform(value: str, checkpoint: Checkpoint) -> Resolved:
    ratio = value.removeprefix(_UNIFORM)
    match = _RATIO.fullmatch(ratio)
    short = match and len(ratio) <= _LONGEST_RATIO
    if not match or not short or match[1] != "1" or int(match[2]) < 1:
        raise PatternError(
            "uniform interleaving is written uniform:1/r, for example uniform:1/4; got "
            f"{quoted(value)}"
        )
    if (interval := int(match[2])) > checkpoint.num_layers:
        raise PatternError(
            f"{quoted(value)} wants one F layer in {interval}, and there are "
            f"{checkpoint.num_layers}. One alone is uniform:1/{checkpoint.num_layers}."
        )
    pattern = Pattern.uniform(checkpoint.num_layers, interval)
    return Resolved(pattern, f"uniform interleaving at {ratio}")


def _looks_literal(value: str) -> bool:
    """Return whether ``value`` looks meant as an F/S string, even a malformed or empty one."""
    return not set(value) - set("FSfs \t") or (value.isalpha() and value.isupper())


def _fits(pattern: Pattern, checkpoint: Checkpoint) -> bool:
    try:
        pattern.check_checkpoint(checkpoint.own)
    except PatternError:
        return False
    return True
