"""``indexcache server doctor``: what a server would do.

It runs the same argument resolution as the server, without loading weights. On a machine without a
GPU it makes SGLang believe that there is one.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback
import warnings
from argparse import ArgumentError, ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_indexcache.checkpoint import text_config
from sglang_indexcache.errors import Findings, IndexCacheError, SettingsError
from sglang_indexcache.kernels.contract import INDEX_DIM, INDEX_KEY_BYTES
from sglang_indexcache.library.sizes import ModelShape, check_room
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.engine_version import EngineSource
from sglang_indexcache.serving.operating.drawing import to_terminal
from sglang_indexcache.serving.operating.features import describe_features, describe_row_split
from sglang_indexcache.serving.options import asks
from sglang_indexcache.serving.plan import BACKEND_FIELDS, BACKEND_NAME, CONFIG_KEY, Plan
from sglang_indexcache.serving.resolve import read_overrides

USUAL_CARD = "h200"
"""Card that a machine without a GPU checks for."""


@dataclass
class Examination:
    """Result of examining flags: what a server with them would do.

    Attributes:
        problems: errors with which its start would fail.
        server: facts about a server that would start, by name; a list for a fact with several
            values.
        pattern: which layers share; None if a problem leaves it undecided.
    """

    checked_for: str = ""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    advice: str = ""
    server: dict[str, str | list[str]] = field(default_factory=dict)
    pattern: Pattern | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the examination under stable names, with ``_`` for the spaces in facts' names."""
        names = {name.lower().replace(" ", "_").replace("-", "_"): name for name in self.server}
        return {
            "fine": not self.problems,
            "checked_for": self.checked_for,
            "problems": self.problems,
            "notes": self.notes,
            "advice": self.advice,
            "server": {key: self.server[name] for key, name in names.items()},
            "pattern": None if self.pattern is None else str(self.pattern),
        }

    def tell(self, console: Console) -> None:
        """Print the examination, with problems first and layers last."""
        if self.checked_for:
            _say(console, "checked for", self.checked_for)
        for problem in self.problems:
            _say(console, "[red]problem[/red]", problem)
        for note in self.notes:
            _say(console, "note", note)
        if not self.problems:
            console.print("[green]no problem found[/green]")
        if self.advice:
            _say(console, "[yellow]advice[/yellow]", self.advice)
        if self.pattern is None:
            return
        console.print()
        table = Table.grid(padding=(0, 2))
        for name, value in self.server.items():
            for number, line in enumerate([value] if isinstance(value, str) else value):
                table.add_row("" if number else f"[bold]{name}[/bold]", escape(line))
        if self.server:
            console.print(table)
            console.print()
        console.print(to_terminal(self.pattern))
        console.print()


def examine(arguments: Sequence[str], device: str | None = None) -> Examination:
    """Examine whether a server with these flags would start, and what it would do.

    Args:
        arguments: flags of ``sglang serve``.
        device: "cpu", "cuda" or a name in :data:`CARDS`; by default this machine's GPU, or
            :data:`USUAL_CARD` if there is none.
    """
    server_args, examination = None, Examination()
    try:
        if not arguments:
            raise SettingsError(
                "say what to look at: the flags that you would give sglang serve, such as "
                "--model-path MODEL --indexcache-pattern 1/4"
            )
        EngineSource.installed()
        print("asking SGLang, which takes a while to load ...", file=sys.stderr, flush=True)
        _look_for_model(arguments)
        examination.checked_for = _choose_device(device)
        server_args, problems, examination.notes = _resolve(arguments, device)
    except IndexCacheError as error:
        problems = [error]
    examination.problems = [str(problem) for problem in problems]
    if any(problem.startswith("SGLang refuses") for problem in examination.problems):
        examination.notes.append("SGLang stops at the first problem that it finds itself.")
    if not problems:
        _describe_server(server_args, examination)
    elif (plan := _planned(server_args)) and plan.source:
        examination.pattern = plan.pattern
        examination.notes.append(f"the pattern is from {plan.source}")
    return examination


def _look_for_model(arguments: Sequence[str]) -> None:
    """Refuse a path without a model early, for which SGLang would try the hub for a minute.

    Raises:
        SettingsError: the model is written as a path that does not exist.
    """
    parser = ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--model-path", "--model", default="")
    try:
        name = str(parser.parse_known_args(arguments)[0].model_path)
    except ArgumentError:  # SGLang reports it too
        return
    if Path(name).exists() or "://" in name:
        return
    if name.startswith(("/", ".", "~")):
        raise SettingsError(f"there is no folder {name} here")
    print(f"{name} is no folder here, so the hub is asked for it ...", file=sys.stderr, flush=True)


def _planned(server_args: Any) -> Plan | None:
    """Return the plan, if the resolution got far enough to make one, else None."""
    if server_args is None:
        return None
    from sglang.srt.arg_groups.overrides import resolving_view

    with suppress(SettingsError):  # already reported as a problem
        overrides = read_overrides(resolving_view(server_args).json_model_override_args)
        return Plan.from_json(overrides.get(CONFIG_KEY))
    return None


def _say(console: Console, what: str, text: str) -> None:
    console.print(f"{what}: {escape(text)}", soft_wrap=True, highlight=False)


def _choose_device(device: str | None) -> str:
    """Make SGLang see the device to check for, before SGLang is imported, and return the name."""
    import torch

    from sglang_indexcache.serving.operating.gpu_stand_in import CARDS, GPUS, stand_in

    names = ("cpu", "cuda", *CARDS)
    if device not in (None, *names):
        raise SettingsError(f"--device may be {', '.join(names)}, got {device!r}")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a server on the CPU needs it too
        return "the CPU reference platform"
    has_gpu = torch.cuda.is_available()
    if device not in CARDS and has_gpu:
        return f"this machine's {torch.cuda.get_device_name()}"
    card = CARDS[device if device in CARDS else USUAL_CARD]
    stand_in(card)
    devices = ", ".join(name for name in names if name != "cuda" and CARDS.get(name) is not card)
    missing = "" if has_gpu else "this machine has no GPU; "
    return f"a node of {GPUS} {card.name} ({missing}--device may also be {devices})"


def _resolve(
    arguments: Sequence[str], device: str | None
) -> tuple[Any, list[IndexCacheError], list[str]]:
    """Parse and resolve the arguments like the server, without its log lines and warnings.

    Returns the arguments as far as SGLang resolved them, or None if it cannot parse them; the
    problems with which a server would fail; and notes on flags that were added for the examination.
    """
    arguments = [*arguments, "--log-level", "critical"]
    if device == "cpu":
        arguments += ["--device", "cpu"]
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    printed, server_args = io.StringIO(), None
    problems: list[IndexCacheError] = []
    notes: list[str] = []
    findings = Findings()
    try:
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args

        load_plugins()
        _check_loaded()
        from sglang_indexcache.serving.plugin import FOUND

        with findings, _as_settings_errors(printed):
            with redirect_stderr(printed):
                server_args = prepare_server_args(arguments)
                if added := _flags_to_ask(server_args):
                    notes += _note_on_added(server_args, device)
                    server_args = prepare_server_args([*arguments, *added])
            setattr(server_args, FOUND, problems)
            server_args.resolve_once()
            _check_weights(server_args)
        return server_args, [*problems, *findings.each], notes
    finally:
        logging.disable(logging.NOTSET)


def _flags_to_ask(server_args: Any) -> list[str]:
    """Return the flags that make parsed arguments ask for IndexCache; none if they ask already.

    Raises:
        SettingsError: our options contradict each other, or a value is out of range.
    """
    from sglang_indexcache.serving.plugin import choices_of

    if asks(server_args, choices_of(server_args)):
        return []
    fields = [name for name in BACKEND_FIELDS if getattr(server_args, name)]
    names = dict.fromkeys((BACKEND_FIELDS[0], *fields))
    return [word for name in names for word in (f"--{name.replace('_', '-')}", BACKEND_NAME)]


def _note_on_added(server_args: Any, device: str | None) -> list[str]:
    """Return a note that the unchanged flags would start plain SGLang, where that is so."""
    given = [value for name in BACKEND_FIELDS if (value := getattr(server_args, name))]
    if device == "cpu" and not given:  # on a CPU only this plugin serves DSA models
        return []
    change = f"in the place of {' and '.join(dict.fromkeys(given))}" if given else "added"
    return [
        "nothing in these flags asks for IndexCache, so a server with them is plain SGLang. What "
        f"follows is about the same flags with --attention-backend {BACKEND_NAME} {change}."
    ]


def _check_weights(server_args: Any) -> None:
    """Refuse weights that do not fit the cards, if their size follows from the config.

    Raises:
        BenchError: the weights do not fit, in the words of ``indexcache bench plan``.
    """
    import torch
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view
    from sglang.srt.utils.common import get_device_memory_capacity

    cfg, model = resolving_view(server_args), model_config_of(server_args)
    shape = ModelShape.from_config(text_config(model.hf_config))
    memory = get_device_memory_capacity(cfg.device) if cfg.device == "cuda" else None
    formats = {cfg.quantization, model.quantization} - {None}
    if shape is None or not memory or cfg.cpu_offload_gb or formats - {"fp8"}:
        return
    size = 1 if formats else model.dtype.itemsize
    stage = shape.weight_bytes(cfg.tp_size, cfg.attn_dp_size, size) / cfg.pp_size
    gpus, dp, card = cfg.tp_size * cfg.pp_size, cfg.attn_dp_size, torch.cuda.get_device_name()
    check_room(cfg.model_path, stage, gpus, dp, card, memory * 2**20)


@contextmanager
def _as_settings_errors(printed: io.StringIO) -> Iterator[None]:
    """Turn the error with which SGLang ends into a SettingsError; let our own errors through."""
    try:
        yield
    except SystemExit:
        last = printed.getvalue().strip().splitlines()[-1]  # "sglang serve: error: ..."
        raise SettingsError(last.partition(" error: ")[2] or last) from None
    except IndexCacheError:
        raise
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        if Path(at.filename).is_relative_to(Path(__file__).parents[2]):
            raise
        text = str(error) or f"{type(error).__name__} at {at.line}"
        raise SettingsError(f"SGLang refuses: {' '.join(text.split())}") from error


def _check_loaded() -> None:
    """Raise SettingsError with the variables that kept the plugin from loading, if any did."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES

    if BACKEND_NAME in ATTENTION_BACKEND_CHOICES:
        return
    variables = {name: os.environ.get(name) for name in ("SGLANG_PLATFORM", "SGLANG_PLUGINS")}
    settings = ", ".join(f"{name}={value}" for name, value in variables.items() if value)
    raise SettingsError(
        f"SGLang did not load this plugin because of {settings}. SGLANG_PLATFORM shuts out every "
        "package that has another platform, as this one has for CPUs, and SGLANG_PLUGINS every "
        "plugin that it does not name. Unset them, or name indexcache (on a CPU indexcache_cpu "
        "too) in SGLANG_PLUGINS."
        if settings
        else "SGLang could not load this plugin; its log says why."
    )


def _describe_server(server_args: Any, examination: Examination) -> None:
    """Add the facts about a server that would start with these flags."""
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    cfg = resolving_view(server_args)
    model = model_config_of(server_args)
    plan = Plan.from_overrides(cfg.json_model_override_args)
    assert plan is not None, "the resolution writes a plan or raises"
    shape = dict(plan.shape)
    sizes = f"{shape.get('index_n_heads')} heads, top {shape.get('index_topk')}"
    sharing = f"shares already: {plan.own.summary()}"
    adapter = f"{plan.adapter} ({plan.adapter_digest[:12]})" if plan.adapter else ""
    facts: dict[str, str | list[str]] = {
        "model": f"{cfg.model_path} ({plan.architecture})",
        "indexers": f"{len(plan.layer_ids)} layers, {sizes}",
        "checkpoint": sharing if plan.own.shared_layers else "ships every indexer",
        "pattern": f"from {plan.source}",
        "adapter": adapter,
        "mode": plan.mode,
        "quality": plan.quality,
        "index-K saved": _saved(plan, model.context_len),
        "row split": describe_row_split(cfg, plan),
        "kernel": [str(route) for route in plan.routes],
        "uses": describe_features(cfg, plan),
    }
    examination.advice, examination.pattern = plan.advice, plan.pattern
    examination.server = {name: value for name, value in facts.items() if value}


def _saved(plan: Plan, context: int) -> str:
    """Return text on the GPU memory for index keys that is saved; ``context`` is in tokens."""
    if plan.mode == "live":
        return "nothing: live mode keeps every layer's index keys"
    if not plan.pattern.shared_layers:
        return "nothing: every layer is F"
    if dict(plan.shape).get("index_head_dim", INDEX_DIM) != INDEX_DIM:
        return f"that of {len(plan.pattern.shared_layers)} of {len(plan.layer_ids)} layers"
    saved = len(plan.pattern.shared_layers) * INDEX_KEY_BYTES
    return (
        f"{saved} of {len(plan.layer_ids) * INDEX_KEY_BYTES} bytes per token on GPUs, "
        f"{saved * context / 2**20:.1f} MiB per request of {context} tokens"
    )
