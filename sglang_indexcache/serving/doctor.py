"""``indexcache server doctor``: what a server with these flags would do, without loading weights.

It runs the very resolution that the server runs, so it cannot disagree with it. Where SGLang is
not installed it reads the checkpoint's config, and says that the flags were not looked at.
"""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import os
import sys
import warnings
from argparse import ArgumentError, ArgumentParser
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_indexcache.checkpoint import INDEX_K_BYTES_PER_KEY, Checkpoint, read_config
from sglang_indexcache.errors import IndexCacheError, SettingsError
from sglang_indexcache.library import Library, names
from sglang_indexcache.serving import adapter
from sglang_indexcache.serving.config_check import check_config
from sglang_indexcache.serving.features import FEATURES
from sglang_indexcache.serving.settings import (
    BACKEND_NAME,
    OPTIONS,
    Plan,
    Request,
    chosen_adapter,
    make_plan,
)
from sglang_indexcache.support.drawing import to_terminal


def examine(arguments: Sequence[str], console: Console) -> bool:
    """Print the findings.

    Args:
        arguments: flags of ``python -m sglang.launch_server``.
        console: where to print.

    Returns:
        Whether such a server would start.
    """
    try:
        if not arguments:
            raise SettingsError(
                "say what to look at: the flags that you would give python -m "
                "sglang.launch_server, such as --model-path MODEL --indexcache-pattern 1/4; or "
                "--url URL of each server that runs"
            )
        if importlib.util.find_spec("sglang") is None:
            _print_config(arguments, console)
        else:
            print("asking SGLang, which takes a while to load ...", file=sys.stderr, flush=True)
            _print(_resolve(arguments), console)
    except SystemExit as usage:  # argparse has said what is wrong with the flags
        return say_problem(console, str(usage.code))
    except IndexCacheError as error:
        return say_problem(console, str(error))
    except (ValueError, AssertionError, OSError) as error:
        return say_problem(console, f"SGLang refuses: {error}")
    return True


def say_problem(console: Console, text: str) -> bool:
    """Print a problem on a line of its own; returns False, the finding."""
    console.print(f"[red]problem[/red]  {escape(text)}", soft_wrap=True, highlight=False)
    return False


def _print_config(arguments: Sequence[str], console: Console) -> None:
    """What the checkpoint's config alone tells."""
    parser = ArgumentParser(add_help=False, exit_on_error=False)
    parser.register("type", "JSON", json.loads)  # so does argparse name it in its error
    parser.add_argument("--model-path", "--model", type=Path)
    parser.add_argument("--json-model-override-args", type="JSON", default={})
    for option in OPTIONS:
        parser.add_argument(option.flag)
    try:
        given, _ = parser.parse_known_args(arguments)
    except ArgumentError as error:
        raise SettingsError(str(error)) from error
    if given.model_path is None:
        raise SettingsError("say which checkpoint: --model-path FOLDER")
    if not given.model_path.is_dir():
        raise SettingsError(
            f"there is no folder {given.model_path}. Without SGLang only a checkpoint's folder can "
            "be read, not a name of the hub: pip install 'sglang-indexcache[serve]'"
        )
    if not isinstance(given.json_model_override_args, dict):
        raise SettingsError("--json-model-override-args wants an object, such as '{\"a\": 1}'")
    request = Request.collect({o.name: getattr(given, o.name) for o in OPTIONS}, as_keywords=False)
    config = read_config(given.model_path)
    checkpoint, library = Checkpoint.from_config(config, str(given.model_path)), Library.default()
    check_config({**config, **given.json_model_override_args}, str(given.model_path))
    trained, model = chosen_adapter(request), given.model_path
    plan = make_plan(request, checkpoint, given.json_model_override_args, library, trained, model)
    if trained is not None:
        adapter.check(trained, model)
    facts = [
        *_facts(plan, given.model_path, checkpoint.shape),
        ("library", names(library.for_checkpoint(checkpoint)) or "no pattern for this model"),
    ]
    _print_plan(plan, facts, console)
    console.print(
        "SGLang is not installed, so only the checkpoint and the pattern were checked. To check "
        "the server's flags as well: pip install 'sglang-indexcache[serve]'",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )


def _resolve(arguments: Sequence[str]) -> Any:
    """Parse and resolve like the server, without its log lines and warnings."""
    arguments = [*arguments, "--log-level", "critical"]
    if not any("attention-backend" in argument for argument in arguments):
        arguments += ["--attention-backend", BACKEND_NAME]
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    said = io.StringIO()
    try:
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args

        load_plugins()
        _check_loaded()
        from sglang_indexcache.serving.plugin import ONLY_EXAMINED

        with redirect_stderr(said):
            server_args = prepare_server_args(arguments)
        setattr(server_args, ONLY_EXAMINED, True)
        server_args.resolve_once()
        return server_args
    except SystemExit:
        last = said.getvalue().strip().splitlines()[-1]  # "sglang serve: error: ..."
        raise SystemExit(last.partition(" error: ")[2] or last) from None
    finally:
        logging.disable(logging.NOTSET)


def _check_loaded() -> None:
    """SGLang would only call our backend an invalid choice."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES

    if BACKEND_NAME in ATTENTION_BACKEND_CHOICES:
        return
    given = {name: os.environ.get(name) for name in ("SGLANG_PLATFORM", "SGLANG_PLUGINS")}
    said = ", ".join(f"{name}={value}" for name, value in given.items() if value)
    raise SettingsError(
        f"SGLang did not load this plugin because of {said}. SGLANG_PLATFORM shuts out every "
        "package that has another platform, as this one has for CPUs, and SGLANG_PLUGINS every "
        "plugin that it does not name. Unset them, or name indexcache (on a CPU indexcache_cpu "
        "too) in SGLANG_PLUGINS."
        if said
        else "SGLang could not load this plugin; its log says why."
    )


def _print(server_args: Any, console: Console) -> None:
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    cfg = resolving_view(server_args)
    model = model_config_of(server_args)
    config = model.hf_config
    plan = Plan.from_hf_config(config)
    assert plan is not None, "the resolution writes a plan or raises"
    facts = [
        *_facts(plan, cfg.model_path, config.to_dict()),
        ("index-K saved", _saved(plan, cfg, model)),
        ("runs on", "the CPU reference platform" if cfg.device == "cpu" else cfg.device),
        *_kernels(plan, cfg, model),
    ]
    _print_plan(plan, facts, console)
    console.print(_features(cfg, plan))
    if plan.advice:
        console.print(f"[yellow]advice[/yellow]  {plan.advice}", soft_wrap=True, highlight=False)
    console.print("[green]no problem found[/green]")


def _facts(plan: Plan, model: Path | str, shape: Mapping[str, Any]) -> list[tuple[str, str]]:
    known = ((shape.get("index_n_heads"), "{} heads"), (shape.get("index_topk"), "top {}"))
    words = [f"{len(plan.layer_ids)} layers", *(say.format(n) for n, say in known if n is not None)]
    return [
        ("model", f"{model} ({plan.architecture})"),
        ("indexers", ", ".join(words)),
        ("checkpoint", _own_sharing(plan)),
        ("pattern", f"from {plan.source}"),
        *([("adapter", f"{plan.adapter} ({plan.adapter_digest[:12]})")] if plan.adapter else []),
        ("mode", plan.mode),
        *([("quality", plan.quality)] if plan.quality else []),
    ]


def _print_plan(plan: Plan, facts: Sequence[tuple[str, str]], console: Console) -> None:
    table = Table.grid(padding=(0, 2))
    for name, value in facts:
        table.add_row(f"[bold]{name}[/bold]", value)
    console.print(table)
    console.print()
    console.print(to_terminal(plan.pattern))
    console.print()


def _kernels(plan: Plan, cfg: Any, model: Any) -> list[tuple[str, str]]:
    """A row for each operation, where the user asked for other kernels than SGLang's."""
    if plan.kernels == "engine":
        return []
    from sglang_indexcache.kernels.dispatch import Machine
    from sglang_indexcache.serving.cuda.choice import choose, describe

    routes = choose(plan.kernels, cfg, model, Machine.here())
    return [("kernel", line) for line in describe(routes)]


def _own_sharing(plan: Plan) -> str:
    if not plan.own.shared_layers:
        return "ships every indexer"
    return f"shares already: {plan.own.summary()}"


def _saved(plan: Plan, cfg: Any, model: Any) -> str:
    if plan.mode == "live":
        return "nothing: live mode keeps every layer's index keys"
    bytes_per_key, layout = INDEX_K_BYTES_PER_KEY, "fp8 pages"
    if cfg.device == "cpu" and plan.index_k_dtype != "fp8_e4m3":
        layout = str(model.dtype).removeprefix("torch.")
        layout = layout if plan.index_k_dtype == "auto" else plan.index_k_dtype
        bytes_per_key = model.hf_config.index_head_dim * (4 if layout == "float32" else 2)
    context, per_token = model.context_len, len(plan.pattern.shared_layers) * bytes_per_key
    parts = [
        f"{per_token} bytes per token ({layout})",
        f"{per_token * context / 2**20:.1f} MiB per request of {context} tokens",
    ]
    if cfg.max_total_tokens:
        parts.append(f"{per_token * cfg.max_total_tokens / 2**30:.2f} GiB in the whole pool")
    return ", ".join(parts)


def _features(cfg: Any, plan: Plan) -> Table:
    table = Table("feature", f"with {plan.mode} mode", "known by", "used", box=SIMPLE)
    for feature in FEATURES:
        support = feature.static if plan.mode == "static" else feature.live
        used = "yes" if feature.in_use(cfg) else "no"
        table.add_row(feature.name, support, feature.evidence, used)
    return table
