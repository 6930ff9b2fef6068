"""The pattern files: ``patterns/*.yaml``, each a pattern, the model it is for, and its evidence."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import LibraryError
from sglang_indexcache.library.lengths import format_length, points
from sglang_indexcache.pattern import FULL, SHARED, Pattern

FORMS = (
    "A pattern is a name of the library, an F/S string, a ratio such as 1/4, uniform:1/4, full, "
    "or, where files are read, the path of a YAML file."
)
"""Sentence for errors: the forms in which a user may write a pattern."""


class Strict(BaseModel):
    """Base of the models for files; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelInfo(Strict):
    """The model that a pattern was found for, and the fields that identify it."""

    name: str
    architectures: tuple[str, ...] = Field(min_length=1)
    num_layers: int = Field(gt=0)
    shape: dict[str, int] = Field(default_factory=dict)
    note: str = ""

    def matches(self, checkpoint: Checkpoint, ignoring: str = "") -> bool:
        """Return whether ``checkpoint`` has this architecture, depth and shape.

        Args:
            ignoring: a field of the shape that may differ.
        """
        return (
            checkpoint.architecture in self.architectures
            and checkpoint.num_layers == self.num_layers
            and all(
                checkpoint.shape.get(name) == value
                for name, value in self.shape.items()
                if name != ignoring
            )
        )


class MethodRecord(Strict):
    """Method by which the pattern was found."""

    name: str
    objective: str = ""
    data: str = ""
    details: dict[str, Any] = Field(default_factory=dict)


class Citation(Strict):
    """Source of the pattern."""

    title: str
    url: str = ""
    where: str = ""


class Quality(Strict):
    """One benchmark score of the pattern, compared with all F and with uniform interleaving."""

    benchmark: str
    score: float
    all_full: float | None = None
    uniform: float | None = None
    where: str = ""


class Evaluated(Strict):
    """Verdict of ``indexcache eval`` on the pattern, on one checkpoint.

    ``verdict`` is one of "no loss", "small loss" (proven, and less than the margin), "loss",
    "undecided", "cannot see" and "invalid". ``margin``, ``difference`` and ``interval`` are shares
    of right answers (0.01 is one point); the last two are the pattern's minus all F's.
    ``checkpoint`` is the `library.digest.checkpoint_digest` of the weights.
    """

    verdict: Literal["no loss", "small loss", "loss", "undecided", "cannot see", "invalid"]
    margin: float = Field(gt=0, lt=1)
    difference: float | None = None
    interval: tuple[float, float] | None = None
    contexts: int = Field(ge=0)
    pairs: int = Field(ge=0)
    tasks: tuple[str, ...] = Field(min_length=1)
    lengths: tuple[int, ...] = Field(min_length=1)
    blind: tuple[str, ...] = ()
    """Tasks and lengths that were run but could not detect a loss; no claim covers them."""
    checkpoint: str = Field(pattern=r"^[0-9a-f]{12,64}$")
    commit: str = ""
    date: str = ""

    def __str__(self) -> str:
        reach = f"in contexts of up to {format_length(max(self.lengths))} tokens"
        if self.blind:
            reach += f", without {', '.join(self.blind)}"
        if self.verdict == "no loss":
            return f"no loss beyond {points(self.margin)} {reach}"
        if self.verdict in ("small loss", "loss") and self.difference is not None:
            below = f" less than the margin of {100 * self.margin:g},"
            bound = below if self.verdict == "small loss" else ""
            return f"it loses {-100 * self.difference:.1f} points of right answers,{bound} {reach}"
        return {
            "cannot see": f"the tasks could not see a loss {reach}",
            "invalid": "the evaluation was refused",
        }.get(self.verdict, f"{self.verdict} {reach}")


NOT_EVALUATED = "not evaluated on this checkpoint"


class Latency(Strict):
    """One latency or throughput of the pattern, with that of all F for comparison."""

    metric: str
    context: str
    unit: str
    value: float
    all_full: float | None = None
    where: str = ""


LETTERS = FULL + SHARED
"""Letters of which a pattern is made."""

_FIRST, _LATER = "A-Za-z0-9", "._-"
"""Characters of a name: those that may begin it, and those allowed from the second on."""


def entry_name(text: str) -> str:
    """Return the valid entry name that is closest to a text."""
    name = re.sub(f"[^{_FIRST}{_LATER}]+", "-", text)
    return name.lstrip(_LATER) or "model"


class Entry(Strict):
    """One pattern file."""

    name: str = Field(pattern=rf"^[{_FIRST}][{_FIRST}{_LATER}]*$")
    model: ModelInfo
    pattern: str
    full_layers: int
    retention: str = Field(pattern="^[0-9]+/[0-9]+$")
    method: MethodRecord
    source: Citation
    quality: tuple[Quality | Evaluated, ...] = ()
    latency: tuple[Latency, ...] = ()

    @field_validator("pattern")
    @classmethod
    def _valid_pattern(cls, text: str) -> str:
        return str(Pattern(text))

    @model_validator(mode="after")
    def _consistent(self) -> Entry:
        self.parsed.check_length(self.model.num_layers)
        count = len(self.parsed.full_layers)
        if count != self.full_layers:
            raise ValueError(f"full_layers says {self.full_layers}, the pattern has {count} F")
        if not set(self.name) - set(LETTERS):
            raise ValueError(f"the name {self.name} is read as the pattern itself; choose another")
        return self

    @cached_property
    def parsed(self) -> Pattern:
        """The pattern as a value."""
        return Pattern(self.pattern)

    @property
    def scores(self) -> tuple[Quality, ...]:
        """Benchmark scores."""
        return tuple(row for row in self.quality if isinstance(row, Quality))

    @property
    def evaluated(self) -> tuple[Evaluated, ...]:
        """Verdicts of ``indexcache eval``, in the order of the file."""
        return tuple(row for row in self.quality if isinstance(row, Evaluated))

    def known(self, digest: Callable[[], str]) -> str:
        """Say what is known about the pattern's quality on a checkpoint, by its last evaluation.

        ``digest`` computes the digest of the checkpoint's weights; it is called only if an
        evaluation could match.
        """
        if not self.evaluated:
            return NOT_EVALUATED
        checkpoint = digest()
        rows = [row for row in self.evaluated if checkpoint.startswith(row.checkpoint)]
        return f"measured here: {rows[-1]}" if rows else NOT_EVALUATED


_MOST_BYTES = 64 << 10
"""Largest size of a pattern file in bytes. A search writes about 2 KiB. PyYAML needs seconds for 64
KiB of nested brackets, and its time grows with the square of the size."""


class _UniqueKeys(yaml.SafeLoader):
    """YAML loader that refuses a key given twice, whose first value PyYAML would drop."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return a mapping's node, or raise a YAMLError that names the repeated key."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        keys: set[Any] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in keys:
                raise yaml.YAMLError(f"line {key.start_mark.line + 1} gives {key.value!r} again")
            keys.add(key.value)
        return node


def parse_yaml(text: str) -> Any:
    """Parse a user's YAML.

    Raises:
        YAMLError: also for a key that is given twice, and for nesting beyond Python's stack.
    """
    try:
        return yaml.load(text, _UniqueKeys)
    except RecursionError:
        raise yaml.YAMLError("its brackets or lists stand in one another too deeply") from None


def is_yaml(path: Path) -> bool:
    """Return whether a path has a suffix of YAML files."""
    return path.suffix.lower() in (".yaml", ".yml")


def load_entry(path: Path) -> Entry:
    """Read and validate one pattern file.

    Raises:
        LibraryError: names the file, the field and what is wrong with it.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise LibraryError(
                f"{path} is larger than {_MOST_BYTES >> 10} KiB, so it is no pattern file. Take "
                "out of it what is not about the pattern."
            )
        data = parse_yaml(content.decode("utf-8"))
    except OSError as error:
        raise LibraryError(f"cannot read pattern file {path}: {error.strerror}. {FORMS}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LibraryError(f"{path} is not valid YAML: {_one_line(error)}") from error
    if not isinstance(data, dict):
        raise LibraryError(f"{path} is not a pattern file: expected a mapping with 'pattern'")
    try:
        return Entry.model_validate(data)
    except ValidationError as error:
        raise LibraryError(f"{path} is not a valid pattern file: {_explain(error)}") from error


def read_folder(folder: Path) -> tuple[dict[str, Entry], list[LibraryError]]:
    """Return every entry of a folder by name, and the reasons why files were left out.

    Invalid files are left out, and so is a second file with the same name.
    """
    entries: dict[str, Entry] = {}
    left_out: list[LibraryError] = []
    try:
        paths = sorted(path for path in folder.iterdir() if is_yaml(path))
    except OSError as error:
        return {}, [LibraryError(f"cannot read the folder {folder}: {error.strerror}")]
    for path in paths:
        try:
            entry = load_entry(path)
            if entry.name in entries:
                raise LibraryError(f"{path} repeats the pattern name {entry.name!r}. Rename one.")
        except LibraryError as error:
            left_out.append(error)
        else:
            entries[entry.name] = entry
    return entries, left_out


def _explain(error: ValidationError) -> str:
    def describe(item: Any) -> str:
        where = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        return f"{where}: {message}" if where else message

    return "; ".join(describe(item) for item in error.errors())


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
