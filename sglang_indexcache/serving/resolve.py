"""Resolution of the user's choices and the model's config into one validated :class:`Plan`.

Nothing here imports SGLang.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_indexcache.checkpoint import SHARING_KEYS, Checkpoint, pattern_from_sharing_keys
from sglang_indexcache.errors import Findings, IndexCacheError, SettingsError
from sglang_indexcache.library.digest import checkpoint_digest
from sglang_indexcache.library.files import NOT_EVALUATED, Entry
from sglang_indexcache.library.resolve import Library, Resolved
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.adapters.folder import Adapter
from sglang_indexcache.serving.adapters.weights import check_form
from sglang_indexcache.serving.config_check import check_config
from sglang_indexcache.serving.options import (
    ADAPTER,
    INDEX_K_DTYPE,
    KERNELS,
    MODE,
    OPTIONS,
    PATTERN,
    SPLIT_ROWS,
    Choice,
    Choices,
    Option,
)
from sglang_indexcache.serving.plan import CONFIG_KEY, Plan
from sglang_indexcache.serving.policy import Policy

logger = logging.getLogger(__name__)

BLINDLY = (
    "F layers at even distances were chosen blindly. For GLM-5 the paper gives 72.7 points on long "
    "contexts with such a quarter, 78.0 with a searched one and 78.4 with every indexer. Search a "
    "pattern on your data (indexcache search run), and measure it before you serve it (indexcache "
    "eval run)."
)
"""Advice on uniform interleaving; its numbers are the paper's (Table 4, Long Avg)."""


def read_overrides(text: str) -> dict[str, Any]:
    """Parse ``--json-model-override-args``, the user's changes to the model's config.

    Raises:
        SettingsError: the text is no JSON object, or has one of our options.
    """
    try:
        overrides = json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingsError(
            f"--json-model-override-args is not JSON ({error}): {text!r}"
        ) from error
    if not isinstance(overrides, dict):
        raise SettingsError("--json-model-override-args wants an object, such as '{\"a\": 1}'")
    for option in OPTIONS:
        if option.name in overrides:
            raise SettingsError(
                f"--json-model-override-args has {option.name}, which nobody reads there. Give "
                f"{option.flag}."
            )
    return overrides


def without_sharing(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides without sharing keys, so that the checkpoint's own sharing remains."""
    return {k: v for k, v in overrides.items() if k not in (*SHARING_KEYS, CONFIG_KEY)}


@dataclass(frozen=True)
class PatternChoice:
    """Choice of a server's pattern by a flag, overrides, an adapter or the checkpoint.

    Attributes:
        policy: the pattern for each prompt length; mostly one for all.
        origin: description of the source.
        entry: the pattern's file, if the source named one.
        adapter: the adapter whose indexers are served, if any.
    """

    policy: Policy
    origin: str
    entry: Entry | None = None
    adapter: Adapter | None = None

    @classmethod
    def from_flag(cls, choice: Choice, checkpoint: Checkpoint, library: Library) -> PatternChoice:
        """Resolve the flag's text into the server's pattern.

        Raises:
            IndexCacheError: the text names no pattern that fits the checkpoint.
        """
        resolved: list[Resolved] = []

        def resolve(value: str) -> Pattern:
            resolved.append(library.resolve(value, checkpoint))
            return resolved[-1].pattern

        try:
            policy = Policy.parse(choice.value, resolve)
        except IndexCacheError as error:
            raise type(error)(f"{choice}: {error}") from error
        entry = resolved[0].entry if len(resolved) == 1 else None
        described = "; ".join(choice.description for choice in resolved)
        return cls(policy, f"{choice} ({described})", entry)

    @classmethod
    def from_overrides(
        cls, overrides: Mapping[str, Any], checkpoint: Checkpoint
    ) -> PatternChoice | None:
        """Read the sharing keys in --json-model-override-args, SGLang's own way to name a pattern.

        Raises:
            IndexCacheError: the keys describe no pattern that fits the checkpoint.
        """
        inner = overrides.get("text_config")
        values = {**(inner if isinstance(inner, Mapping) else {}), **overrides}
        keys = [key for key in SHARING_KEYS if values.get(key) is not None]
        if not keys:
            return None
        origin = f"--json-model-override-args ({', '.join(keys)})"
        try:
            pattern = pattern_from_sharing_keys(values, checkpoint.layer_ids)
            if pattern is None:
                raise SettingsError("an offset alone is no schedule. Give index_topk_freq too.")
            pattern.check_checkpoint(checkpoint.own)
        except IndexCacheError as error:
            raise type(error)(f"{origin}: {error}") from error
        return cls(Policy.of(pattern), origin)

    @classmethod
    def from_adapter(
        cls, folder: str, model: Path, requested: PatternChoice | None, findings: Findings
    ) -> PatternChoice:
        """Choose the pattern that an adapter was trained for; ``requested`` must be equal or None.

        Raises:
            IndexCacheError: there is no adapter, or it is for another pattern. Its problems with
                this ``model`` go to ``findings``.
        """
        adapter = Adapter.read(Path(folder))
        for pattern in requested.policy.patterns if requested else ():
            adapter.check_pattern(pattern)
        with findings:
            _check_folder(model)
            adapter.check(model)
            check_form(model, adapter.names())
        if requested is not None:
            return replace(requested, adapter=adapter)
        return cls(Policy.of(adapter.pattern), f"the adapter {adapter.folder}", adapter=adapter)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> PatternChoice:
        """Choose the checkpoint's own sharing, because nobody chose a pattern."""
        trained = "the checkpoint, which was trained with it"
        origin = trained if checkpoint.shares_already else "the default"
        return cls(Policy.of(checkpoint.own), origin)


def _check_folder(model: Path) -> None:
    """Raise SettingsError for a Hub name, because its files are not here to be compared."""
    if not model.is_dir():
        raise SettingsError(
            f"{ADAPTER.flag} needs --model-path to be a folder, to compare the checkpoint with the "
            f"one that the adapter was trained on; {model} is none. Download it first."
        )


def plan_server(
    choices: Choices,
    config: Any,
    overrides: Mapping[str, Any],
    model: str,
    findings: Findings,
    *,
    on_cpu: bool,
) -> Plan:
    """Decide the plan of a server from its checkpoint and the user's choices.

    Args:
        config: the model's config, with the overrides that do not concern sharing.
        overrides: the user's ``--json-model-override-args``.
        model: the user's name for the checkpoint; mostly its folder.
        on_cpu: whether the CPU platform serves it.

    If no pattern can be chosen, the plan has no source, and is only used to find further problems.

    Raises:
        IndexCacheError: no plan can be made; problems that leave a plan go to ``findings``.
    """
    checkpoint = Checkpoint.from_config(config, model)
    checkpoint.check_served(model)
    plan = None
    with findings:
        check_config(config, model, on_cpu=on_cpu)
    with findings:
        plan = make_plan(choices, checkpoint, overrides, model, findings)
    if plan is None:
        plan = _plan_without_pattern(choices, checkpoint, model, findings)
    return plan


def _plan_without_pattern(
    choices: Choices, checkpoint: Checkpoint, model: str, findings: Findings
) -> Plan:
    """Plan the other choices if no pattern can be chosen, so that their problems are found too.

    Raises:
        IndexCacheError: has the problems found so far, if no plan can be made at all.
    """
    others = {key: choice for key, choice in choices.items() if key not in (PATTERN, ADAPTER)}
    try:
        plan = make_plan(others, checkpoint, {}, model, findings)
    except IndexCacheError:  # the same problem again
        findings.report()
        raise
    return replace(plan, source="", advice="")


def make_plan(
    choices: Choices,
    checkpoint: Checkpoint,
    overrides: Mapping[str, Any],
    model: str,
    findings: Findings,
) -> Plan:
    """Decide the pattern and the mode of a server.

    Args:
        checkpoint: facts from the model's own config, without the user's ``overrides``.
        model: the checkpoint's folder, for matching a verdict on the pattern by its weights.
        findings: collects problems that still leave a plan.

    Raises:
        IndexCacheError: says what is wrong, and how to fix it.
    """
    library = Library.default()
    for error in library.left_out:
        logger.warning("IndexCache: left out of the library: %s", error)
    values: dict[Option, Any] = {option: choice.value for option, choice in choices.items()}
    mode = values.get(MODE, "static")
    requested = _requested_pattern(choices, checkpoint, overrides, library)
    if (folder := choices.get(ADAPTER)) is not None:
        requested = PatternChoice.from_adapter(folder.value, Path(model), requested, findings)
    choice = requested or PatternChoice.from_checkpoint(checkpoint)
    if len(choice.policy.steps) > 1 and mode == "static":
        raise SettingsError(
            f"{choice.origin}: prompt length can decide in live mode only. Add {MODE.flag} live."
        )
    adapter = choice.adapter
    # Pattern files are about the checkpoint's own indexers, not about an adapter's.
    is_in_files = choice.policy.patterns[-1] != checkpoint.own and adapter is None
    quality = _evidence(choice, library, model) if is_in_files else ""
    return Plan(
        pattern=choice.policy.patterns[0],
        source=choice.origin,
        mode=mode,
        own=checkpoint.own,
        layer_ids=checkpoint.layer_ids,
        architecture=checkpoint.architecture,
        index_k_dtype=values.get(INDEX_K_DTYPE, "auto"),
        kernels=values.get(KERNELS, "engine"),
        adapter=str(adapter.folder.resolve()) if adapter else "",
        adapter_digest=adapter.digest if adapter else "",
        advice=_advice(choice if requested else None, checkpoint, library),
        quality=quality,
        longer=choice.policy.steps[1:],
        split_rows=values.get(SPLIT_ROWS, "auto"),
        shape=tuple(checkpoint.shape.items()),
        library=library.digest,
    )


def _evidence(choice: PatternChoice, library: Library, model: str) -> str:
    """Return the library's verdict, for these weights, on the pattern of the longest prompts.

    Only weights in a folder can be identified; for others no verdict applies.
    """
    pattern = choice.policy.patterns[-1]
    alike = (entry for entry in library.entries.values() if entry.parsed == pattern)
    entries = [choice.entry] if choice.entry else list(alike)
    weights = Path(model) if model and Path(model).is_dir() else None
    verdicts = (entry.known(lambda: checkpoint_digest(weights)) for entry in entries if weights)
    return next((words for words in verdicts if words != NOT_EVALUATED), NOT_EVALUATED)


def _requested_pattern(
    choices: Choices, checkpoint: Checkpoint, overrides: Mapping[str, Any], library: Library
) -> PatternChoice | None:
    """Return the user's choice, by our flag or by SGLang's override keys; both must agree."""
    flag = choices.get(PATTERN)
    ours = PatternChoice.from_flag(flag, checkpoint, library) if flag else None
    engines = PatternChoice.from_overrides(overrides, checkpoint)
    if ours and engines and ours.policy != engines.policy:
        raise SettingsError(
            f"{ours.origin} gives {ours.policy} and {engines.origin} gives {engines.policy}. "
            "Give only one."
        )
    return ours or engines


def _is_uniform(choice: PatternChoice, checkpoint: Checkpoint) -> bool:
    """Return whether some pattern is uniform interleaving with S layers, and not from a file."""
    return choice.entry is None and any(
        pattern == Pattern.uniform(len(pattern), math.ceil(1 / pattern.retention))
        for pattern in choice.policy.patterns
        if pattern != checkpoint.own
    )


def _advice(choice: PatternChoice | None, checkpoint: Checkpoint, library: Library) -> str:
    """Return a warning if layers were chosen blindly, or if no pattern was given and none share."""
    if choice is not None:
        return "" if choice.adapter or not _is_uniform(choice, checkpoint) else BLINDLY
    if checkpoint.shares_already:
        return ""
    start = "no pattern was given, so every layer runs its indexer and nothing is saved"
    if names := ", ".join(entry.name for entry in library.for_checkpoint(checkpoint)):
        return f"{start}. The library has {names} for this model: add {PATTERN.flag} NAME."
    return f"{start}. The library has no pattern for this model; see: indexcache patterns --help."
