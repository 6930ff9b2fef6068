"""The user's options: flags, Engine keywords and variables, and whether they ask for IndexCache.

Nothing here imports SGLang.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from sglang_indexcache.errors import KernelError, SettingsError
from sglang_indexcache.kernels.dispatch import chosen, stated_overlap
from sglang_indexcache.library.resolve import LIBRARY_VARIABLE
from sglang_indexcache.serving.plan import (
    BACKEND_FIELDS,
    BACKEND_NAME,
    ENGINE_NAME,
    IndexKDtype,
    Mode,
    SplitRows,
)

DSA_NAMES = (ENGINE_NAME, "nsa")


@dataclass(frozen=True)
class Option:
    """One user-facing setting: a command-line flag, an Engine keyword and a variable."""

    name: str
    help: str
    choices: tuple[str, ...] | None = None
    metavar: str | None = None

    @property
    def flag(self) -> str:
        """Command-line flag, such as ``--indexcache-pattern``."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Environment variable, such as ``SGLANG_INDEXCACHE_PATTERN``."""
        return "SGLANG_" + self.name.upper()


PATTERN = Option(
    "indexcache_pattern",
    "Which layers keep their indexer: an F/S string with one character per layer, the name of a "
    "library pattern (see: indexcache patterns list), a YAML file, a ratio such as 1/4 (looked up "
    "in the library for this model), uniform:1/4, or full. "
    "In live mode also a choice by prompt length: "
    "'full < 32K <= 1/2 < 128K <= 1/4'. Default: the checkpoint's own sharing.",
    metavar="PATTERN",
)
MODE = Option(
    "indexcache_mode",
    "static (default): shared layers are built without indexer and without index-K cache. "
    "live: every layer keeps both, and each request has its own pattern: the one that it names, "
    "else the server's, which can be replaced while it runs.",
    choices=get_args(Mode),
)
INDEX_K_DTYPE = Option(
    "indexcache_index_k_dtype",
    "How the CPU platform stores index keys: auto (the model's dtype), bfloat16, float32, or "
    "fp8_e4m3 (the GPU's pages and quantisation). GPUs always use fp8_e4m3.",
    choices=get_args(IndexKDtype),
)
KERNELS = Option(
    "indexcache_kernels",
    "GPU kernels of the indexer (logits, top-k and page lookup in one) and of sparse attention. "
    "engine (default): SGLang's. auto: for each call what this card's record shows faster, ours or "
    "SGLang's; auto:70 where neighbouring rows' lists share 70 % at least. "
    "cuda (Hopper), reference: that implementation of ours for all "
    "operations, or an error that says why not; cuda:sparse_mla, cuda:prefill, "
    "cuda:select-prefill,sparse_mla: for these, and SGLang's for the others.",
    metavar="KERNELS",
)
ADAPTER = Option(
    "indexcache_adapter",
    "A folder that indexcache heal run wrote: its indexers take the place of the checkpoint's, "
    "and its pattern is the pattern. Static mode only. Refused with another checkpoint than the "
    "one it was trained on.",
    metavar="FOLDER",
)
SPLIT_ROWS = Option(
    "indexcache_split_rows",
    "Let each rank of attention's tensor parallelism run the indexers for its share of a prefill's "
    "rows, and gather the lists: the same selections, to the bit, at a share of the work. auto "
    "(default): on the CPU platform, where it was measured, and not on GPUs. on: refused where it "
    "cannot be.",
    choices=get_args(SplitRows),
)
OPTIONS = (PATTERN, MODE, INDEX_K_DTYPE, KERNELS, ADAPTER, SPLIT_ROWS)


@dataclass(frozen=True)
class Choice:
    """A value that the user gave, and its source."""

    value: str
    origin: str

    def __str__(self) -> str:
        return f"{self.origin} {self.value}"


Choices = dict[Option, Choice]
"""All choices of the user, before they are validated."""


def collect(values: Mapping[str, str | None], *, as_keywords: bool = False) -> Choices:
    """Merge flags (or Engine keywords) with the environment.

    Raises:
        SettingsError: two sources disagree, a value is out of range, or a variable is unknown.
    """
    choices: Choices = {}
    _check_variables()
    for option in OPTIONS:
        origin = f"Engine({option.name}=...)" if as_keywords else option.flag
        direct, variable = values.get(option.name), os.environ.get(option.variable)
        if None not in (direct, variable) and direct != variable:
            raise SettingsError(
                f"{origin} is {direct!r} and {option.variable} is {variable!r}. Give only one."
            )
        if direct is not None:
            choices[option] = Choice(direct, origin)
        elif variable is not None:
            choices[option] = Choice(variable, option.variable)
    for option, choice in choices.items():
        if option.choices is not None and choice.value not in option.choices:
            raise SettingsError(
                f"{choice.origin} is {choice.value!r}; it may be {', '.join(option.choices)}"
            )
    if KERNELS in choices and choices[KERNELS].value != "engine":
        try:
            if stated_overlap(choices[KERNELS].value) is None:
                chosen(choices[KERNELS].value)
        except KernelError as error:
            raise SettingsError(f"{choices[KERNELS].origin}: {error}; or engine") from None
    return choices


def _check_variables() -> None:
    """Raise SettingsError for a variable that is written like ours and that nobody would read."""
    known = [*(option.variable for option in OPTIONS), LIBRARY_VARIABLE]
    for name in sorted(os.environ):
        if name.startswith("SGLANG_INDEXCACHE_") and name not in known:
            raise SettingsError(
                f"the variable {name} is set, and IndexCache reads none of that name. Unset it, "
                f"or take one of {', '.join(known)}."
            )


def asks(cfg: Any, choices: Choices) -> bool:
    """Return whether flags ask for IndexCache, by its backend name or by one of our options.

    ``cfg`` has SGLang's arguments, resolved or not.
    """
    drafts = cfg.speculative_draft_attention_backend
    return bool(choices) or BACKEND_NAME in (*_backends(cfg).values(), drafts)


def is_wanted(cfg: Any, choices: Choices, *, on_cpu: bool) -> bool:
    """Return whether this server is to run IndexCache.

    Args:
        cfg: SGLang's view of the server's arguments.
        on_cpu: whether the CPU platform is active, where SGLang has no DSA backend of its own.

    Raises:
        SettingsError: IndexCache is asked for together with another backend.
    """
    if asks(cfg, choices):
        _check_backends(cfg, choices)
        return True
    if on_cpu and _backends(cfg) and not other_backends(cfg):
        raise SettingsError(
            "SGLang's own DSA backend needs a GPU and this machine has none. Use "
            f"--attention-backend {BACKEND_NAME}, which has a CPU reference."
        )
    return False


def _check_backends(cfg: Any, choices: Choices) -> None:
    """Raise SettingsError if another backend was given although the user asks for IndexCache."""
    backends, foreign = _backends(cfg), other_backends(cfg)
    is_named = BACKEND_NAME in backends.values()
    settings = ", ".join(choice.origin for choice in choices.values())
    if not is_named and cfg.speculative_draft_attention_backend == BACKEND_NAME:
        raise SettingsError(
            f"--speculative-draft-attention-backend {BACKEND_NAME} needs --attention-backend "
            f"{BACKEND_NAME}: a draft's layers follow the model's."
        )
    # Beside our name, other backends may be for layers without indexers, which only the plan knows.
    if foreign and cfg.attention_backend != BACKEND_NAME:
        raise SettingsError(
            not_together(f"--attention-backend {BACKEND_NAME}" if is_named else settings, foreign)
        )
    if backends and not is_named:
        raise SettingsError(
            f"{settings} needs --attention-backend {BACKEND_NAME}, and "
            f"--attention-backend {next(iter(backends.values()))} was given."
        )


def _backends(cfg: Any) -> dict[str, str]:
    """Return the attention backends that were given, by field."""
    return {field: getattr(cfg, field) for field in BACKEND_FIELDS if getattr(cfg, field)}


def other_backends(cfg: Any) -> dict[str, str]:
    """Return the attention backends that cannot share indices, by field."""
    return {k: v for k, v in _backends(cfg).items() if v not in (BACKEND_NAME, *DSA_NAMES)}


def not_together(what: str, others: Mapping[str, str]) -> str:
    """Return why ``what`` cannot be combined with the first of :func:`other_backends`."""
    field, value = next(iter(others.items()))
    return (
        f"{what} does not go with --{field.replace('_', '-')} {value}: IndexCache shares the "
        "indices of DSA attention in prefill and decode alike. Drop one of them."
    )
