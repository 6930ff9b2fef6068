"""``indexcache server doctor``: what a server with these flags would do, without loading weights.

It runs the very resolution that the server runs, so it cannot disagree with it.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from sglang_indexcache.checkpoint import INDEX_K_BYTES_PER_KEY
from sglang_indexcache.errors import IndexCacheError
from sglang_indexcache.kernels.dispatch import Machine
from sglang_indexcache.serving.cuda.choice import choose
from sglang_indexcache.serving.features import FEATURES
from sglang_indexcache.serving.settings import BACKEND_NAME, Plan
from sglang_indexcache.support.drawing import to_terminal


def examine(arguments: Sequence[str], console: Console) -> bool:
    """Print the findings.

    Args:
        arguments: flags of ``python -m sglang.launch_server``.
        console: where to print.

    Returns:
        Whether such a server would start.
    """
    arguments = [*arguments, "--log-level", "critical"]
    if not any("attention-backend" in argument for argument in arguments):
        arguments += ["--attention-backend", BACKEND_NAME]
    try:
        server_args = _resolve(arguments)
    except SystemExit as usage:  # argparse has said what is wrong with the flags
        console.print(f"[red]problem[/red]  {usage.code}", soft_wrap=True, highlight=False)
        return False
    except IndexCacheError as error:
        console.print(f"[red]problem[/red]  {error}", soft_wrap=True, highlight=False)
        return False
    except (ValueError, AssertionError, OSError) as error:
        console.print(f"[red]problem[/red]  SGLang refuses: {error}", soft_wrap=True)
        return False
    _print(server_args, console)
    return True


def _resolve(arguments: list[str]) -> Any:
    """Parse and resolve like the server, without its log lines and warnings."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    said = io.StringIO()
    try:
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args

        load_plugins()
        from sglang_indexcache.serving.plugin import RAISE_ERRORS

        with redirect_stderr(said):
            server_args = prepare_server_args(arguments)
        setattr(server_args, RAISE_ERRORS, True)
        server_args.resolve_once()
        return server_args
    except SystemExit:
        raise SystemExit(said.getvalue().strip().splitlines()[-1]) from None
    finally:
        logging.disable(logging.NOTSET)


def _print(server_args: Any, console: Console) -> None:
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    cfg = resolving_view(server_args)
    model = model_config_of(server_args)
    config = model.hf_config
    plan = Plan.from_hf_config(config)
    assert plan is not None, "the resolution writes a plan or raises"
    facts = Table.grid(padding=(0, 2))
    for name, value in (
        ("model", f"{cfg.model_path} ({plan.architecture})"),
        ("indexers", f"{len(plan.layer_ids)} layers, {config.index_n_heads} heads, "
                     f"top {config.index_topk}"),
        ("checkpoint", _own_sharing(plan)),
        ("pattern", f"from {plan.source}"),
        ("mode", plan.mode),
        ("index-K saved", _saved(plan, cfg, model.context_len)),
        ("runs on", "the CPU reference platform" if cfg.device == "cpu" else cfg.device),
        *_kernels(plan, cfg, model),
    ):  # fmt: skip
        facts.add_row(f"[bold]{name}[/bold]", value)
    console.print(facts)
    console.print()
    console.print(to_terminal(plan.pattern))
    console.print()
    console.print(_features(cfg, plan))
    if plan.advice:
        console.print(f"[yellow]advice[/yellow]  {plan.advice}", soft_wrap=True, highlight=False)
    console.print("[green]no problem found[/green]")


def _kernels(plan: Plan, cfg: Any, model: Any) -> list[tuple[str, str]]:
    """A row for each operation, where the user asked for other kernels than SGLang's."""
    if plan.kernels == "engine":
        return []
    return [("kernel", str(r)) for r in choose(plan.kernels, cfg, model, Machine.here())]


def _own_sharing(plan: Plan) -> str:
    if not plan.own.shared_layers:
        return "ships every indexer"
    return f"shares already: {plan.own.summary()}"


def _saved(plan: Plan, cfg: Any, context: int) -> str:
    if plan.mode == "live":
        return "nothing: live mode keeps every layer's index keys"
    per_token = len(plan.pattern.shared_layers) * INDEX_K_BYTES_PER_KEY
    parts = [
        f"{per_token} bytes per token (fp8 pages)",
        f"{per_token * context / 2**20:.1f} MiB per request of {context} tokens",
    ]
    if cfg.max_total_tokens:
        parts.append(f"{per_token * cfg.max_total_tokens / 2**30:.2f} GiB in the whole pool")
    return ", ".join(parts)


def _features(cfg: Any, plan: Plan) -> Table:
    table = Table("feature", f"with {plan.mode} mode", "known by", "used", box=SIMPLE)
    for feature in FEATURES:
        support = feature.static if plan.mode == "static" else feature.live
        used = "yes" if feature.in_use(cfg) else ""
        table.add_row(feature.name, support, feature.evidence, used)
    return table
