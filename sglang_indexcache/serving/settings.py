"""Flags, environment and model config, resolved into one validated :class:`Plan`.

Nothing here imports SGLang. The plan travels to every process inside the HF config.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from sglang_indexcache.adapter import Adapter
from sglang_indexcache.checkpoint import SHARING_KEYS, Checkpoint, pattern_from_sharing_keys
from sglang_indexcache.errors import Findings, IndexCacheError, SettingsError
from sglang_indexcache.kernels.dispatch import NAMES
from sglang_indexcache.library import NOT_EVALUATED, Entry, Library, Resolved, names
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.policy import Policy
from sglang_indexcache.serving.preflight.config_check import check_config
from sglang_indexcache.study.provenance import checkpoint_digest

BACKEND_NAME = "indexcache"
"""What a user writes after --attention-backend."""

Mode = Literal["static", "live"]
IndexKDtype = Literal["auto", "bfloat16", "float32", "fp8_e4m3"]

CONFIG_KEY = "indexcache"
"""Attribute of the HF config that carries the plan."""


@dataclass(frozen=True)
class Option:
    """One user-facing setting: a command-line flag, an Engine keyword and a variable."""

    name: str
    help: str
    choices: tuple[str, ...] | None = None
    metavar: str | None = None

    @property
    def flag(self) -> str:
        """``--indexcache-pattern``."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """``SGLANG_INDEXCACHE_PATTERN``."""
        return "SGLANG_" + self.name.upper()


PATTERN = Option(
    "indexcache_pattern",
    "Which layers keep their indexer: an F/S string with one character per layer, the name of a "
    "library pattern (see: indexcache patterns list), a YAML file, a ratio such as 1/4 (looked up "
    "in the library for this model), uniform:1/4, or full; with +w8 behind it, shared layers "
    "also see the last 8 tokens. In live mode also a choice by prompt length: "
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
    "engine (default): SGLang's. cuda (Hopper), reference: that implementation of ours for all "
    "operations, or an error (see: indexcache kernels list).",
    choices=("engine", *NAMES),
)
ADAPTER = Option(
    "indexcache_adapter",
    "A folder that indexcache heal run wrote: its indexers take the place of the checkpoint's, "
    "and its pattern is the pattern. Static mode only. Refused with another checkpoint than the "
    "one it was trained on.",
    metavar="FOLDER",
)
GRAPHS = Option(
    "indexcache_graphs",
    "Decode CUDA graphs to capture besides the one that serves every batch, as a list with commas. "
    "short: for batches whose requests all have at most index_topk tokens, where selecting is "
    "selecting everything and indexers need not run; exact. In live mode, which captures no graph "
    "without this option, also up to 4 patterns: a batch of one of them replays its graph, any "
    "other a graph that runs every indexer. Each costs memory and time at the start for every "
    "batch size. Not measured on a GPU yet.",
    metavar="LIST",
)
SHADOW = Option(
    "indexcache_shadow",
    "Watch the server's pattern drift: of one forward in N (on: in 1,000), compare 16 rows' lists "
    "with what each layer would have selected itself, in live mode S layers with their own "
    "indexer, in static mode F layers with the F layer before. For metrics, /server_info and "
    "indexcache server watch; answers stay as they are. Off by default.",
    metavar="N",
)
OPTIONS = (PATTERN, MODE, INDEX_K_DTYPE, KERNELS, ADAPTER, GRAPHS, SHADOW)

_SHADOW_ON = 1000
"""Forwards of which one is sampled, if the user does not say."""

SHORT = "short"
"""In the list of graphs: the one of batches in which nothing is left out."""
MOST_GRAPHS = 4
"""Patterns with a graph of their own."""


@dataclass(frozen=True)
class Choice:
    """A value that the user gave, and where."""

    value: str
    origin: str

    def __str__(self) -> str:
        return f"{self.origin} {self.value}"


Said = dict[Option, Choice]
"""Everything the user said, before it is known whether it makes sense."""


def collect(given: Mapping[str, str | None], *, as_keywords: bool = False) -> Said:
    """Merge flags (or Engine keywords) with the environment.

    Raises:
        SettingsError: they disagree, or a value is out of range.
    """
    said: Said = {}
    for option in OPTIONS:
        origin = f"Engine({option.name}=...)" if as_keywords else option.flag
        direct, variable = given.get(option.name), os.environ.get(option.variable)
        if None not in (direct, variable) and direct != variable:
            raise SettingsError(
                f"{origin} is {direct!r} and {option.variable} is {variable!r}. Give only one."
            )
        if direct is not None:
            said[option] = Choice(direct, origin)
        elif variable is not None:
            said[option] = Choice(variable, option.variable)
    for option, choice in said.items():
        if option.choices is not None and choice.value not in option.choices:
            raise SettingsError(
                f"{choice.origin} is {choice.value!r}; it may be {', '.join(option.choices)}"
            )
    return said


def read_overrides(text: str) -> dict[str, Any]:
    """``--json-model-override-args``: what the user changes in the model's config.

    Raises:
        SettingsError: that is no JSON object.
    """
    try:
        overrides = json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingsError(
            f"--json-model-override-args is not JSON ({error}): {text!r}"
        ) from error
    if not isinstance(overrides, dict):
        raise SettingsError("--json-model-override-args wants an object, such as '{\"a\": 1}'")
    return overrides


def without_sharing(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides that say nothing of sharing: the config with them is that of the checkpoint."""
    return {k: v for k, v in overrides.items() if k not in (*SHARING_KEYS, CONFIG_KEY)}


@dataclass(frozen=True)
class Plan:
    """What this server will do: the pattern in effect and how it is carried out.

    Attributes:
        pattern: in effect at start; of the shortest prompts where length decides.
        source: where it came from, in words.
        own: the checkpoint's own sharing.
        layer_ids: model layer of each pattern position.
        adapter: folder of the adapter whose indexers are served, or "".
        adapter_digest: SHA-256 of its weights, or "".
        advice: a warning for the log, or "".
        quality: what is known of the pattern's long-context quality on this checkpoint, or "".
        longer: live mode: from how many prompt tokens on another pattern is in effect, and which.
        graphs: what decode graphs are captured beside SGLang's: ``short``, or a pattern's text.
        shadow: of how many forwards one is sampled for the overlap of lists; 0 for none.
        overlap: beyond chance, what the pattern's file says of each layer; () if it says nothing.
        shape: config fields by which the library knows the model.
    """

    pattern: Pattern
    source: str
    mode: Mode
    own: Pattern
    layer_ids: tuple[int, ...]
    architecture: str
    index_k_dtype: IndexKDtype = "auto"
    kernels: str = "engine"
    adapter: str = ""
    adapter_digest: str = ""
    advice: str = ""
    quality: str = ""
    longer: tuple[tuple[int, Pattern], ...] = ()
    graphs: tuple[str, ...] = ()
    shadow: int = 0
    overlap: tuple[float | None, ...] = ()
    shape: tuple[tuple[str, Any], ...] = ()

    @property
    def policy(self) -> Policy:
        """The pattern for each prompt length."""
        return Policy(((0, self.pattern), *self.longer))

    @property
    def graph_patterns(self) -> tuple[Pattern, ...]:
        """Those that have a decode graph of their own."""
        return tuple(Pattern(text) for text in self.graphs if text != SHORT)

    def graph_reserve_mb(self, cfg: Any) -> int:
        """MB to keep free on each GPU for the graphs beside SGLang's.

        SGLang leaves 2 MB free for each request of its largest decode graph, however many graphs
        it captures of a size (``reserve_for_graph_mb``), and gives the rest to the KV pool. So
        this is an estimate by SGLang's own figure, not measured on a GPU. ``cfg`` is its resolving
        view of the server's arguments, after ``handle_gpu_memory_settings``.
        """
        if not self.graphs or cfg.disaggregation_mode == "prefill":
            return 0
        return len(self.graphs) * 2 * (cfg.cuda_graph_config.decode.max_bs or 0)

    def describe(self) -> str:
        """The line for the log."""
        shared = len(self.pattern.shared_layers)
        return (
            f"IndexCache ({self.mode}): {self.pattern.summary()}, {shared} reuse indices; "
            f"pattern {self.policy} from {self.source}"
            + (f"; indexers of the adapter {self.adapter}" if self.adapter else "")
            + (f"; long-context quality: {self.quality}" if self.quality else "")
        )

    @property
    def terms(self) -> str:
        """What every process of a server must agree on; where it was said may differ."""
        return (
            f"{self.mode} mode, pattern {self.policy}, kernels {self.kernels}, index keys "
            f"{self.index_k_dtype}"
            + (f", adapter {self.adapter_digest[:12]}" if self.adapter else "")
            + (f", graphs {', '.join(self.graphs)}" if self.graphs else "")
        )

    def kv_namespace(self, pattern: Pattern) -> str | None:
        """What keeps the cached KV of a request apart from all KV that is computed otherwise.

        None where there is nothing to keep apart: under the checkpoint's own sharing and with its
        own indexers stock SGLang computes the same KV and may have it. Not so in live mode, where
        requests of all patterns meet: none may reach another's KV by an ``extra_key`` of its own.
        """
        if self.mode == "live":
            return f"indexcache-live-{pattern.digest}"
        if pattern == self.own and not self.adapter:
            return None
        indexers = f"-{self.adapter_digest[:12]}" if self.adapter else ""
        return f"indexcache-{pattern.digest}{indexers}"

    def hf_overrides(self) -> dict[str, Any]:
        """What to write into the HF config so that SGLang builds this plan.

        ``indexer_types`` is the key that SGLang obeys first; the others are cleared. In live mode
        every indexer of the checkpoint is built.
        """
        built = self.pattern if self.mode == "static" else self.own
        overrides: dict[str, Any] = dict.fromkeys(SHARING_KEYS)
        overrides["indexer_types"] = self._by_model_layer(built)
        overrides[CONFIG_KEY] = json.loads(json.dumps(vars(self), default=str))
        return overrides

    def _by_model_layer(self, pattern: Pattern) -> list[str]:
        types = ["full"] * (self.layer_ids[-1] + 1)
        for layer, kind in zip(self.layer_ids, pattern.to_indexer_types(), strict=True):
            types[layer] = kind
        return types

    @classmethod
    def from_hf_config(cls, config: Any) -> Plan | None:
        """The plan that :meth:`hf_overrides` wrote, or None if there is none."""
        return cls.from_json(getattr(config, CONFIG_KEY, None))

    @classmethod
    def from_overrides(cls, overrides: str) -> Plan | None:
        """The plan in resolved ``--json-model-override-args``, or None if there is none."""
        return cls.from_json(json.loads(overrides).get(CONFIG_KEY))

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> Plan | None:
        """The inverse of what :meth:`hf_overrides` stores under :data:`CONFIG_KEY`."""
        if data is None:
            return None
        data = dict(data)
        data["pattern"], data["own"] = Pattern(data["pattern"]), Pattern(data["own"])
        data["layer_ids"] = tuple(data["layer_ids"])
        data["longer"] = tuple((start, Pattern(text)) for start, text in data["longer"])
        data["graphs"], data["overlap"] = tuple(data["graphs"]), tuple(data["overlap"])
        data["shape"] = tuple((name, value) for name, value in data["shape"])
        return cls(**data)

    def checkpoint(self) -> Checkpoint:
        """The checkpoint as the plan knows it, enough to find another pattern and to check it."""
        return Checkpoint(self.architecture, self.layer_ids, self.own, dict(self.shape))


def plan_server(
    said: Said,
    config: Any,
    overrides: Mapping[str, Any],
    model: str,
    found: Findings,
    *,
    on_cpu: bool,
) -> Plan:
    """Decide the plan of a server, by its checkpoint alone.

    Args:
        config: the model's, with the overrides that say nothing of sharing.
        overrides: the user's ``--json-model-override-args``.
        model: what the user calls the checkpoint; mostly its folder.
        on_cpu: whether the CPU platform serves it.

    Raises:
        IndexCacheError: the problems, which go to ``found``, leave no plan.
    """
    checkpoint = Checkpoint.from_config(config, model)
    checkpoint.check_served(model)
    plan = adapter = None
    with found:
        check_config(config, model, on_cpu=on_cpu)
    with found:
        if (choice := said.get(ADAPTER)) is not None:
            adapter = Adapter.read(Path(choice.value))
        plan = make_plan(said, checkpoint, overrides, adapter, model)
    if plan is None:
        found.report()
    assert plan is not None, "making one raises, or it is there"
    with found:
        if adapter is not None:
            check_adapter(adapter, Path(model))
    return plan


def check_adapter(adapter: Adapter, model: Path) -> None:
    """Refuse an adapter for another checkpoint, or one that cannot take its indexers' place."""
    from sglang_indexcache.stored import check_form

    if not model.is_dir():
        raise SettingsError(
            f"{ADAPTER.flag} needs --model-path to be a folder, to compare the checkpoint with the "
            f"one that the adapter was trained on; {model} is none. Download it first."
        )
    adapter.check(model)
    check_form(model, adapter.names())


def make_plan(
    said: Said,
    checkpoint: Checkpoint,
    overrides: Mapping[str, Any],
    adapter: Adapter | None = None,
    model: str = "",
) -> Plan:
    """Decide the pattern and the mode.

    Args:
        checkpoint: what the model's own config says, without the user's ``overrides``.
        model: the checkpoint's folder, by which a verdict on the pattern is known to be about it.

    Raises:
        IndexCacheError: what is wrong, and how to mend it.
    """
    library = Library.default()
    chosen = _chosen_pattern(said, checkpoint, library)
    upstream = _upstream_pattern(overrides, checkpoint)
    if chosen and upstream and chosen[0] != upstream[0]:
        raise SettingsError(
            f"{chosen[1]} gives {chosen[0]} and {upstream[1]} gives {upstream[0]}. Give only one."
        )
    asked = chosen[:2] if chosen else upstream
    if adapter is not None:
        for pattern in asked[0].patterns if asked else ():
            adapter.check_pattern(pattern)
        adapter.pattern.check_checkpoint(checkpoint.own)
        asked = asked or (Policy.of(adapter.pattern), f"the adapter {adapter.folder}")
    values: dict[Option, Any] = {option: choice.value for option, choice in said.items()}
    mode = values.get(MODE, "static")
    by_training = "the checkpoint, which was trained with it"
    default = by_training if checkpoint.shares_already else "the default"
    policy, source = asked or (Policy.of(checkpoint.own), default)
    if len(policy.steps) > 1 and mode == "static":
        raise SettingsError(
            f"{source}: prompt length can decide in live mode only. Add {MODE.flag} live."
        )
    pattern, known = policy.patterns[0], ""
    overlap: tuple[float | None, ...] = ()
    if pattern != checkpoint.own and adapter is None:  # files are about a checkpoint's indexers
        entry = chosen[2] if chosen else None
        entries = [entry] if entry else [e for e in library.entries.values() if e.parsed == pattern]
        known = _known_quality(entries, model)
        overlap = next((e.overlap.beyond_chance for e in entries if e.overlap), ())
    return Plan(
        pattern=pattern,
        source=source,
        mode=mode,
        own=checkpoint.own,
        layer_ids=checkpoint.layer_ids,
        architecture=checkpoint.architecture,
        index_k_dtype=values.get(INDEX_K_DTYPE, "auto"),
        kernels=values.get(KERNELS, "engine"),
        adapter=str(adapter.folder.resolve()) if adapter else "",
        adapter_digest=adapter.digest if adapter else "",
        advice="" if asked else _advice(checkpoint, library),
        quality=known,
        longer=policy.steps[1:],
        graphs=_graphs(said, checkpoint, library, mode),
        shadow=_shadow(said),
        overlap=overlap,
        shape=tuple(checkpoint.shape.items()),
    )


def _shadow(said: Said) -> int:
    choice = said.get(SHADOW)
    if choice is None:
        return 0
    if choice.value == "on":
        return _SHADOW_ON
    if not re.fullmatch("[1-9][0-9]{0,8}", choice.value):
        raise SettingsError(
            f"{choice.origin} is {choice.value!r}; give the number of forwards of which one is "
            f"sampled, or on for {_SHADOW_ON}"
        )
    return int(choice.value)


def _known_quality(entries: Iterable[Entry], model: str) -> str:
    """What is known on these weights of the pattern of ``entries``."""
    found = (
        entry.known(lambda: checkpoint_digest(Path(model)))
        for entry in entries
        if model and Path(model).is_dir()
    )
    return next((words for words in found if words != NOT_EVALUATED), NOT_EVALUATED)


def _chosen_pattern(
    said: Said, checkpoint: Checkpoint, library: Library
) -> tuple[Policy, str, Entry | None] | None:
    choice = said.get(PATTERN)
    if choice is None:
        return None
    resolved: list[Resolved] = []

    def resolve(value: str) -> Pattern:
        resolved.append(library.resolve(value, checkpoint))
        return resolved[-1].pattern

    try:
        policy = Policy.parse(choice.value, resolve)
    except IndexCacheError as error:
        raise type(error)(f"{choice}: {error}") from error
    entry = resolved[0].entry if len(resolved) == 1 else None
    described = "; ".join(each.description for each in resolved)
    return policy, f"{choice} ({described})", entry


def _graphs(said: Said, checkpoint: Checkpoint, library: Library, mode: Mode) -> tuple[str, ...]:
    choice = said.get(GRAPHS)
    if choice is None:
        return ()
    listed = dict.fromkeys(name.strip() for name in choice.value.split(","))
    names = [name for name in listed if name != SHORT]
    if names and mode == "static":
        raise SettingsError(
            f"{choice}: static mode captures the graphs of its one pattern anyway. Ask for {SHORT} "
            f"only, or add {MODE.flag} live."
        )
    try:
        found = dict.fromkeys(str(library.resolve(n, checkpoint).pattern) for n in names)
    except IndexCacheError as error:
        raise type(error)(f"{choice}: {error}") from error
    if len(found) > MOST_GRAPHS:
        raise SettingsError(
            f"{choice}: {len(found)} patterns, and each takes memory and time for every batch "
            f"size. Name {MOST_GRAPHS} at most; batches of other patterns are served all the same."
        )
    return (*([SHORT] if SHORT in listed else []), *found)


def _upstream_pattern(
    overrides: Mapping[str, Any], checkpoint: Checkpoint
) -> tuple[Policy, str] | None:
    """SGLang's own way of asking: sharing keys in --json-model-override-args."""
    inner = overrides.get("text_config")
    values = {**(inner if isinstance(inner, Mapping) else {}), **overrides}
    given = [key for key in SHARING_KEYS if values.get(key) is not None]
    if not given:
        return None
    said = f"--json-model-override-args ({', '.join(given)})"
    try:
        pattern = pattern_from_sharing_keys(values, checkpoint.num_layers, checkpoint.layer_ids)
        if pattern is None:
            raise SettingsError("an offset alone is no schedule. Give index_topk_freq too.")
        pattern.check_checkpoint(checkpoint.own)
    except IndexCacheError as error:
        raise type(error)(f"{said}: {error}") from error
    return Policy.of(pattern), said


def _advice(checkpoint: Checkpoint, library: Library) -> str:
    """The one warning when nobody chose a pattern and nothing is shared."""
    if checkpoint.shares_already:
        return ""
    start = "no pattern was given, so every layer runs its indexer and nothing is saved"
    if known := library.for_checkpoint(checkpoint):
        return f"{start}. The library has {names(known)} for this model: add {PATTERN.flag} NAME."
    return f"{start}. The library has no pattern for this model; see: indexcache patterns --help."
