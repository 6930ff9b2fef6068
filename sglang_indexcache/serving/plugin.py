"""Entry point ``sglang.srt.plugins``: make SGLang accept and resolve ``indexcache``.

SGLang compares backend names with the literal "dsa" in many places, and ``indexcache`` is a DSA
backend. So the name is resolved to "dsa" at the first step of SGLang's own resolution, and the
"dsa" factory is replaced. The raw input keeps the operator's text.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from sglang.srt.arg_groups.choices import add_attention_backend_choices
from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

from sglang_indexcache.checkpoint import (
    CONFIG_FILE,
    SHARING_KEYS,
    Checkpoint,
    check_fields,
    read_config,
    reading,
    text_config,
)
from sglang_indexcache.errors import CheckpointError, Findings, IndexCacheError
from sglang_indexcache.kernels.dispatch import Machine
from sglang_indexcache.serving import (
    engine_version,
    hooks,
    http_checks,
    plan_agreement,
    refusals,
)
from sglang_indexcache.serving.cpu import fp8
from sglang_indexcache.serving.cpu import platform as platform_cpu
from sglang_indexcache.serving.cuda.choice import (
    check_engine,
    check_reference,
    choose,
)
from sglang_indexcache.serving.options import (
    OPTIONS,
    Choices,
    collect,
    is_wanted,
)
from sglang_indexcache.serving.plan import BACKEND_FIELDS, BACKEND_NAME, Plan
from sglang_indexcache.serving.resolve import (
    plan_server,
    read_overrides,
    without_sharing,
)

logger = logging.getLogger(__name__)

_GIVEN = "_indexcache_given"
"""Attribute of ServerArgs with the flags or keywords as given, and whether they are flags. It is
pickled with the fields."""

FOUND = "_indexcache_found"
"""Attribute of ServerArgs that are only examined: a list for problems that would end a start. With
it, modules that only a server needs are not loaded."""


def register() -> None:
    """Install the plugin; SGLang calls this in every process, before it parses arguments."""
    _end_if_left_alone()
    add_attention_backend_choices([BACKEND_NAME])
    hooks.after("sglang.srt.server_args.ServerArgs.add_cli_args", _add_flags, at_start=True)
    hooks.around("sglang.srt.server_args.ServerArgs.from_cli_args", _keep_flags, at_start=True)
    hooks.around(
        "sglang.srt.arg_groups.model_hook._validate_dsa_tbo_index_sharing",
        _allow_overlap,
        at_start=True,
    )
    _accept_engine_keywords()
    # At this step the model's path is known, and nothing has read its config yet.
    register_resolution_hook("handle_model_source_paths")(_after_sglangs(_resolve))
    # At this step SGLang's kernels, KV dtype and parallelism are decided.
    register_resolution_hook("handle_other_validations")(_after_sglangs(_route_kernels))
    _register_backend()
    plan_agreement.install()
    if platform_cpu.is_active():
        platform_cpu.adapt_engine()


def _end_if_left_alone() -> None:
    """End this process if its server was killed while the process still loaded modules.

    SGLang asks the kernel for a signal at the parent's death, but only later: a process whose
    parent has died before that would wait for the other ranks for ever.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        raise SystemExit("the server was killed while this process of it started")


def _register_backend() -> None:
    """Replace the "dsa" factory, but keep SGLang's own for servers that run no IndexCache."""
    from sglang.srt.layers.attention import attention_registry

    original = attention_registry.create_dsa_backend

    def create(runner: Any) -> Any:
        from sglang_indexcache.serving.factory import create_backend  # slow to import

        return create_backend(runner, original)

    def refuse(runner: Any) -> Any:
        if runner.is_draft_worker:
            return original(runner)
        raise plan_agreement.unresolved(f"the attention backend {BACKEND_NAME}")

    attention_registry.register_attention_backend("dsa")(create)
    # Resolution turns our name into "dsa". A process that still has our name was resolved without
    # this plugin, and SGLang would dispatch the model's layers for an unknown backend.
    attention_registry.register_attention_backend(BACKEND_NAME)(refuse)


# -- what the user says ------------------------------------------------------------------------


def _add_flags(_result: None, parser: ArgumentParser) -> None:
    group = parser.add_argument_group("IndexCache (with --attention-backend indexcache)")
    for option in OPTIONS:
        group.add_argument(
            option.flag,
            help=option.help,
            choices=option.choices,
            metavar=option.metavar,
            action=_Once,
        )


class _Once(Action):
    """Argparse action that refuses an option given twice; argparse would take the last value."""

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, value: Any, option: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest, None)
        if before not in (None, value):
            parser.error(f"{option} is given twice, as {before!r} and as {value!r}. Give one.")
        setattr(namespace, self.dest, value)


def _keep_flags(original: Callable[..., Any], cls: type, args: Namespace) -> Any:
    server_args = original(cls, args)
    values = {option.name: getattr(args, option.name, None) for option in OPTIONS}
    setattr(server_args, _GIVEN, (values, True))
    return server_args


def _accept_engine_keywords() -> None:
    """Accept ``Engine(indexcache_pattern=...)``; the Engine loads plugins before it reads keywords.

    If the Engine's module is not loaded, it is left alone: importing it would slow every worker's
    start.
    """
    module = sys.modules.get("sglang.srt.entrypoints.engine")
    if module is None:
        return
    original = module.Engine.server_args_class

    def build(**kwargs: Any) -> Any:
        values = {option.name: kwargs.pop(option.name, None) for option in OPTIONS}
        server_args = original(**kwargs)
        setattr(server_args, _GIVEN, (values, False))
        return server_args

    module.Engine.server_args_class = staticmethod(build)


# -- what it comes to --------------------------------------------------------------------------


def _after_sglangs(check: Callable[[Any], None]) -> Callable[..., None]:
    """Run ``check`` after a resolution step of SGLang's."""

    def step(server_args: Any, previous: Callable[[Any], None]) -> None:
        previous(server_args)
        try:
            check(server_args)
        except IndexCacheError as error:
            _, are_flags = _values_of(server_args)
            if are_flags and not hasattr(server_args, FOUND):  # a sentence instead of a traceback
                raise SystemExit(f"indexcache: error: {error}") from None
            raise

    return step


def _values_of(server_args: Any) -> tuple[dict[str, str | None], bool]:
    values: tuple[dict[str, str | None], bool] = getattr(server_args, _GIVEN, ({}, False))
    return values


def choices_of(server_args: Any) -> Choices:
    """Return the user's choices of our options, from flags, keywords or variables.

    Raises:
        SettingsError: two sources disagree, or a value is out of range.
    """
    values, are_flags = _values_of(server_args)
    return collect(values, as_keywords=not are_flags)


def _resolve(server_args: Any) -> None:
    choices = choices_of(server_args)
    cfg, on_cpu = resolving_view(server_args), platform_cpu.is_active()
    if not is_wanted(cfg, choices, on_cpu=on_cpu) and not _is_only_way(cfg):
        _warn_about_ignored_overrides(cfg)
        return
    engine_version.check()
    hooks.check()
    overrides = read_overrides(cfg.json_model_override_args)
    config = _checkpoint_config(cfg, overrides)
    findings = Findings()
    plan = plan_server(choices, config, overrides, cfg.model_path, findings, on_cpu=on_cpu)
    with findings:
        num_layers = dict(plan.shape).get("num_hidden_layers", len(plan.layer_ids))
        refusals.check(cfg, plan, num_layers)
    with findings:
        platform_cpu.check_plan(server_args, plan)
    examined = getattr(server_args, FOUND, None)
    if examined is None:
        findings.report()
        http_checks.install()
        vars(server_args)["get_tokenizer_worker_class"] = http_checks.tokenizer_worker_class
    else:  # SGLang's later checks may find more
        examined.extend(findings.each)
    fields = plan.engine_fields(cfg)
    merged = plan.config_overrides(overrides, config) | (fp8.overrides(config) if on_cpu else {})
    if cfg.enable_metrics:
        from sglang_indexcache.serving.operating.metrics import collectors

        fields["stat_loggers"] = collectors(cfg.stat_loggers)
    declare_resolution(
        server_args, BACKEND_NAME, json_model_override_args=json.dumps(merged), **fields
    )
    logger.info(plan.describe())
    if plan.advice:
        logger.warning("IndexCache: %s", plan.advice)


def _route_kernels(server_args: Any) -> None:
    """Decide which kernels every worker runs, or raise an error if requested kernels cannot run."""
    cfg = resolving_view(server_args)
    plan = Plan.from_overrides(cfg.json_model_override_args)
    if plan is None:
        return
    model = model_config_of(server_args)
    refusals.check_pooled_keys(plan, text_config(model.hf_config))
    machine = Machine.here()
    routes = choose(plan.kernels, cfg, model, machine)
    check_engine(routes, cfg, model, machine)
    if plan.kernels == "engine":
        return
    check_reference(routes, cfg)
    declare_resolution(
        server_args,
        BACKEND_NAME,
        json_model_override_args=plan.with_routes(routes, cfg.json_model_override_args),
    )
    for route in routes:
        logger.info("IndexCache kernels: %s", route)


def _is_only_way(cfg: Any) -> bool:
    """Return whether only IndexCache can serve this model here, although nobody asked for it."""
    if not platform_cpu.is_active() or any(getattr(cfg, field) for field in BACKEND_FIELDS):
        return False
    try:
        checkpoint = Checkpoint.from_config(
            _checkpoint_config(cfg, read_overrides(cfg.json_model_override_args)), cfg.model_path
        )
        checkpoint.check_served(cfg.model_path)
    except CheckpointError:  # not a DSA model, or one that cannot be served
        return False
    logger.info(
        "IndexCache: SGLang's own DSA backend needs a GPU and this machine has none, so this "
        "server runs with --attention-backend %s.",
        BACKEND_NAME,
    )
    return True


def _checkpoint_config(cfg: Any, overrides: Mapping[str, Any]) -> Any:
    """Return the model's config as shipped, with the user's overrides except sharing keys."""
    from sglang.srt.utils.hf_transformers.config import get_config

    path = Path(cfg.model_path)
    if path.is_absolute() and not path.exists():
        raise CheckpointError(f"there is no model at {path}")
    check_fields(overrides, "--json-model-override-args")
    if (path / CONFIG_FILE).is_file():  # else a hub name, or a single file
        read_config(path)
    with reading(f"the model config of {cfg.model_path}"):
        config = get_config(
            cfg.model_path,
            trust_remote_code=cfg.trust_remote_code,
            revision=cfg.revision,
            model_override_args=without_sharing(overrides),
            model_config_parser=cfg.model_config_parser,
        )
    return deepcopy(config)


def _allow_overlap(original: Callable[..., None], server_args: Any, hf_config: Any) -> None:
    """Allow two-batch overlap with sharing: SGLang refuses it, but our buffer carries indices."""
    if Plan.from_hf_config(hf_config) is None:
        original(server_args, hf_config)


def _warn_about_ignored_overrides(cfg: Any) -> None:
    """Warn that SGLang ignores a pattern override if the config class fills ``indexer_types``."""
    overrides = read_overrides(cfg.json_model_override_args)
    keys = [key for key in SHARING_KEYS[1:3] if overrides.get(key) is not None]
    if not keys or overrides.get("indexer_types") is not None:
        return
    config = _checkpoint_config(cfg, overrides)
    if getattr(config, "indexer_types", None) is not None:
        logger.warning(
            "SGLang ignores %s for this model, because its config also says indexer_types: no "
            "layer will share. Add --attention-backend %s to make the override work.",
            ", ".join(keys),
            BACKEND_NAME,
        )
