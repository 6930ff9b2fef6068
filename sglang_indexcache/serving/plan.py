"""Plan of a server: the pattern in effect and how it is carried out.

The plan travels to every process inside the model's config. Nothing here imports SGLang.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from sglang_indexcache.checkpoint import SHARING_KEYS, Checkpoint
from sglang_indexcache.kernels.contract import OpName
from sglang_indexcache.kernels.dispatch import AUTO, Phase
from sglang_indexcache.kernels.routes import OURS, Routes
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.policy import Policy

BACKEND_NAME = "indexcache"
"""Name that a user writes after --attention-backend."""
ENGINE_NAME = "dsa"
"""SGLang's name for the backend, a literal with which it compares names in many places."""

Mode = Literal["static", "live"]
IndexKDtype = Literal["auto", "bfloat16", "float32", "fp8_e4m3"]
SplitRows = Literal["auto", "on", "off"]

BACKEND_FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
"""SGLang's arguments that name an attention backend; the last two may be left out."""

CONFIG_KEY = "indexcache"
"""Attribute of the HF config that carries the plan."""


class Route(NamedTuple):
    """Kernel choice for one operation in one phase: our implementation, or None for SGLang's.

    Attributes:
        card: the card whose record chooses for each call (our kernels only if ``implementation``
            names them); "" if one kernel runs every call.
        overlap: least percentage of entries that neighbouring rows' lists share, as the operator
            states.
    """

    op: OpName
    phase: Phase
    implementation: str | None
    why: str
    card: str = ""
    overlap: int = 0

    @property
    def measured(self) -> Routes | None:
        """Routes that choose for each call; None if one kernel runs every call."""
        table = Routes.of_card(self.card, self.overlap) if self.card else None
        return table.without(OURS) if table and not self.implementation else table

    def __str__(self) -> str:
        name = AUTO if self.card else self.implementation or "engine"
        return f"{self.op} in {self.phase}: {name} ({self.why})"


@dataclass(frozen=True)
class Plan:
    """Plan of this server: the pattern in effect and how it is carried out.

    Attributes:
        pattern: the pattern in effect at start; if prompt length decides, that of the shortest
            prompts.
        source: description of where the pattern came from.
        own: the checkpoint's own sharing.
        layer_ids: model layer of each pattern position.
        kernels: the request for kernels in place of SGLang's, as the user wrote it.
        routes: the kernels chosen for that request, after SGLang has resolved everything else; ()
            if every kernel is SGLang's.
        adapter: folder of the adapter whose indexers are served, or "".
        adapter_digest: SHA-256 of its weights, or "".
        advice: a warning for the log, or "".
        quality: what is known about the pattern's long-context quality on this checkpoint, or "".
        longer: in live mode, prompt lengths in tokens, each with the pattern that applies from
            there on.
        split_rows: whether the ranks of attention's tensor parallelism divide an indexer's rows
            among them.
        shape: config fields by which the library knows the model.
        library: digest of the library's pattern files.
    """

    pattern: Pattern
    source: str
    mode: Mode
    own: Pattern
    layer_ids: tuple[int, ...]
    architecture: str
    index_k_dtype: IndexKDtype = "auto"
    kernels: str = "engine"
    routes: tuple[Route, ...] = ()
    adapter: str = ""
    adapter_digest: str = ""
    advice: str = ""
    quality: str = ""
    longer: tuple[tuple[int, Pattern], ...] = ()
    split_rows: SplitRows = "auto"
    shape: tuple[tuple[str, Any], ...] = ()
    library: str = ""

    def __post_init__(self) -> None:
        """Refuse a pattern for which the checkpoint lacks layers or indexers."""
        for pattern in self.policy.patterns:
            pattern.check_checkpoint(self.own)

    @property
    def policy(self) -> Policy:
        """Policy with the pattern for each prompt length."""
        return Policy(((0, self.pattern), *self.longer))

    def describe(self) -> str:
        """Return the line that describes this plan in the log."""
        shared = len(self.pattern.shared_layers)
        return (
            f"IndexCache ({self.mode}): {self.pattern.summary()}, {shared} reuse indices; "
            f"pattern {self.policy} from {self.source}"
            + (f"; indexers of the adapter {self.adapter}" if self.adapter else "")
            + (f"; long-context quality: {self.quality}" if self.quality else "")
        )

    @property
    def terms(self) -> str:
        """Text of the settings that all processes of a server must share; the source may differ."""
        return (
            f"{self.mode} mode, pattern {self.policy}, kernels {self.kernels}, index keys "
            f"{self.index_k_dtype}"
            + (f", library {self.library}" if self.library else "")
            + (f", adapter {self.adapter_digest[:12]}" if self.adapter else "")
            + (f", row split {self.split_rows}" if self.split_rows != "auto" else "")
        )

    def kv_namespace(self, pattern: Pattern) -> str | None:
        """Return the name that keeps a request's cached KV apart from KV of other settings.

        It is None if nothing needs to be kept apart: with the checkpoint's own sharing and
        indexers, stock SGLang computes the same KV and may reuse it. In live mode it is never None:
        requests with all patterns meet there, and no request may reach another's KV through its own
        ``extra_key``.
        """
        if self.mode == "live":
            return f"indexcache-live-{pattern.digest}"
        if pattern == self.own and not self.adapter:
            return None
        indexers = f"-{self.adapter_digest[:12]}" if self.adapter else ""
        return f"indexcache-{pattern.digest}{indexers}"

    @property
    def kv_apart(self) -> str | None:
        """:meth:`kv_namespace` of the pattern in effect at start."""
        return self.kv_namespace(self.pattern)

    def engine_fields(self, cfg: Any) -> dict[str, Any]:
        """Return further values for SGLang's arguments; ``cfg`` is the resolving view of them."""
        fields: dict[str, Any] = {
            name: ENGINE_NAME
            for name in BACKEND_FIELDS
            if name == BACKEND_FIELDS[0] or getattr(cfg, name)
        }
        if cfg.speculative_draft_attention_backend == BACKEND_NAME:
            # Draft models have their own indexers, which SGLang's backend serves.
            fields["speculative_draft_attention_backend"] = ENGINE_NAME
        if self.mode == "live":
            # A captured graph would always replay the pattern with which it was captured.
            fields["cuda_graph_backend_prefill"] = "disabled"
            fields["cuda_graph_backend_decode"] = "disabled"
        return fields

    def config_overrides(self, users: Mapping[str, Any], config: Any) -> dict[str, Any]:
        """Return the user's config overrides, with every sharing key replaced by this plan's.

        A multimodal model's layers may be built from its text config, so the overrides go there
        too.
        """
        ours = self.hf_overrides()
        merged = {**users, **ours}
        if getattr(config, "text_config", None) is not None:
            merged["text_config"] = {**users.get("text_config", {}), **ours}
        return merged

    def with_routes(self, routes: tuple[Route, ...], overrides: str) -> str:
        """Return resolved ``--json-model-override-args``, with ``routes`` added to their plan."""
        merged = json.loads(overrides)
        plan = replace(self, routes=routes)._as_json()
        for config in (merged, merged.get("text_config", {})):
            if CONFIG_KEY in config:
                config[CONFIG_KEY] = plan
        return json.dumps(merged)

    def hf_overrides(self) -> dict[str, Any]:
        """Return the HF config fields with which SGLang builds the model for this plan.

        ``indexer_types`` is the key that SGLang obeys first; the other keys are cleared. In live
        mode SGLang builds every indexer of the checkpoint.
        """
        built = self.pattern if self.mode == "static" else self.own
        overrides: dict[str, Any] = dict.fromkeys(SHARING_KEYS)
        overrides["indexer_types"] = self._by_model_layer(built)
        overrides[CONFIG_KEY] = self._as_json()
        return overrides

    def _as_json(self) -> Any:
        return json.loads(json.dumps(vars(self), default=str))

    def _by_model_layer(self, pattern: Pattern) -> list[str]:
        types = ["full"] * (self.layer_ids[-1] + 1)
        for layer, kind in zip(self.layer_ids, pattern.to_indexer_types(), strict=True):
            types[layer] = kind
        return types

    @classmethod
    def from_hf_config(cls, config: Any) -> Plan | None:
        """Return the plan that :meth:`hf_overrides` wrote, or None if there is none."""
        return cls.from_json(getattr(config, CONFIG_KEY, None))

    @classmethod
    def from_overrides(cls, overrides: str) -> Plan | None:
        """Return the plan in resolved ``--json-model-override-args``, or None if there is none."""
        return cls.from_json(json.loads(overrides).get(CONFIG_KEY))

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> Plan | None:
        """Read a plan from the data that :meth:`hf_overrides` stores under :data:`CONFIG_KEY`."""
        if data is None:
            return None
        data = dict(data)
        data["pattern"], data["own"] = Pattern(data["pattern"]), Pattern(data["own"])
        data["layer_ids"] = tuple(data["layer_ids"])
        data["routes"] = tuple(Route(*route) for route in data["routes"])
        data["longer"] = tuple((start, Pattern(text)) for start, text in data["longer"])
        data["shape"] = tuple((name, value) for name, value in data["shape"])
        return cls(**data)

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint from the plan's fields, enough to find and check a pattern."""
        return Checkpoint(self.architecture, self.layer_ids, self.own, dict(self.shape))
