"""The ``indexcache`` command; thin, one function a subcommand."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from sglang_indexcache import __version__
from sglang_indexcache.bench.cli import register as register_bench
from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import IndexCacheError
from sglang_indexcache.library import Entry, Library, load_entry
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.cli import COMMANDS
from sglang_indexcache.training.command import register as register_training

app = typer.Typer(
    help="IndexCache for SGLang: let most DSA layers reuse the indices of an earlier layer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
patterns_app = typer.Typer(help="The pattern library.", no_args_is_help=True)
live_app = typer.Typer(
    help="Look at a running server and switch its pattern.", no_args_is_help=True
)
app.add_typer(patterns_app, name="patterns")
app.add_typer(live_app, name="live")

out = Console()
_P = ParamSpec("_P")

UrlOption = Annotated[str, typer.Option(help="Base URL of the server.")]


def _reporting(command: Callable[_P, None]) -> Callable[_P, None]:
    """Turn our errors into one line on stderr and exit code 1."""

    @wraps(command)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except IndexCacheError as error:
            typer.secho(f"indexcache: error: {error}", err=True, fg="red")
            raise typer.Exit(1) from None

    return wrapped


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sglang-indexcache {__version__}")
        raise typer.Exit


@app.callback()
def main(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Options of the command itself."""


# -- patterns ----------------------------------------------------------------------------------


@patterns_app.command("list")
@_reporting
def list_patterns(
    model: Annotated[
        Path | None, typer.Option(help="Only patterns that fit this checkpoint's config.json.")
    ] = None,
) -> None:
    """List the library's patterns."""
    library = Library.default()
    entries = list(library.entries.values())
    if model is not None:
        entries = library.for_checkpoint(Checkpoint.read(model))
    table = Table("name", "model", "layers", "F", "retention", "found by", box=SIMPLE)
    table.columns[0].no_wrap = True
    for entry in entries:
        table.add_row(
            entry.name,
            entry.model.name,
            str(entry.model.num_layers),
            str(entry.full_layers),
            entry.retention,
            entry.method.name,
        )
    out.print(table if entries else "no pattern in the library fits this checkpoint")


@patterns_app.command("show")
@_reporting
def show_pattern(
    name: Annotated[str, typer.Argument(help="A library name or a YAML file.")],
) -> None:
    """Show a pattern with its provenance and what is known of its quality."""
    entry = _entry(name)
    out.print(_drawing(entry.parsed, f"{entry.name}: {entry.model.name}"))
    out.print(f"\n{entry.pattern}\n", soft_wrap=True, highlight=False)
    out.print(f"found by   {entry.method.name}, minimising {entry.method.objective}")
    out.print(f"data       {entry.method.data}")
    out.print(f"source     {entry.source.title}, {entry.source.where} ({entry.source.url})")
    if entry.model.note:
        out.print(f"note       {entry.model.note.strip()}")
    if entry.quality:
        table = Table("benchmark", "this pattern", "all F", "uniform", "source", title="quality")
        for row in entry.quality:
            scores = (row.score, row.all_full, row.uniform)
            shown = ["" if score is None else f"{score:g}" for score in scores]
            table.add_row(row.benchmark, *shown, row.where)
        out.print(table)
    if entry.latency:
        table = Table("metric", "context", "this pattern", "all F", "source", title="latency")
        for speed in entry.latency:
            speeds = (speed.value, speed.all_full)
            shown = ["" if value is None else f"{value:g} {speed.unit}" for value in speeds]
            table.add_row(speed.metric, speed.context, *shown, speed.where)
        out.print(table)


@patterns_app.command("validate")
@_reporting
def validate_patterns(
    files: Annotated[list[Path], typer.Argument(help="Pattern files (YAML).")],
) -> None:
    """Check pattern files; exit code 1 if one is wrong."""
    failures = 0
    for path in files:
        try:
            entry = load_entry(path)
        except IndexCacheError as error:
            typer.secho(f"indexcache: error: {error}", err=True, fg="red")
            failures += 1
        else:
            typer.echo(f"{path}: {entry.name}, {entry.parsed.summary()}")
    if failures:
        raise typer.Exit(1)


@patterns_app.command("draw")
@_reporting
def draw_patterns(
    values: Annotated[list[str], typer.Argument(help="F/S strings, library names or YAML files.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A .png or .svg file to write.")
    ] = None,
) -> None:
    """Draw which layer serves which, in the terminal or as a picture."""
    drawn = [(value, _literal_or_entry(value)) for value in values]
    if output is None:
        for title, pattern in drawn:
            out.print(_drawing(pattern, title))
        return
    from sglang_indexcache.drawing import to_image

    titled = [("" if str(pattern) == title else title, pattern) for title, pattern in drawn]
    to_image(titled, output)
    typer.echo(f"wrote {output}")


def _drawing(pattern: Pattern, title: str) -> Any:
    from sglang_indexcache.drawing import to_terminal

    return to_terminal(pattern, title)


def _entry(name: str) -> Entry:
    return (
        load_entry(Path(name)) if name.endswith((".yaml", ".yml")) else Library.default().get(name)
    )


def _literal_or_entry(value: str) -> Pattern:
    if value and not set(value) - {"F", "S"}:
        return Pattern(value)
    return _entry(value).parsed


# -- a running server --------------------------------------------------------------------------


@live_app.command("show")
@_reporting
def live_show(url: UrlOption = "http://127.0.0.1:30000") -> None:
    """Show the pattern in effect and what the layers did so far."""
    from sglang_indexcache.serving import Client

    _print_states(Client(url).states())


@live_app.command("set")
@_reporting
def live_set(
    pattern: Annotated[str, typer.Argument(help="As for --indexcache-pattern.")],
    url: UrlOption = "http://127.0.0.1:30000",
) -> None:
    """Replace the pattern of a server that runs in live mode."""
    from sglang_indexcache.serving import Client

    _print_states(Client(url).switch_pattern(pattern))


def _print_states(states: list[dict[str, Any]]) -> None:
    for rank, state in enumerate(states):
        if len(states) > 1:
            out.print(f"data-parallel rank {rank}", style="bold")
        out.print(_drawing(Pattern(state["pattern"]), f"{state['mode']} mode, {state['source']}"))
        out.print(f"forwards since the last switch: {state['forwards']}")
        out.print(f"index-K bytes per token: {state['index_k_bytes_per_token']}")


# -- checkpoints and servers -------------------------------------------------------------------


@app.command("make-model")
@_reporting
def make_model_command(
    folder: Annotated[Path, typer.Argument(help="Where to write the checkpoint.")],
    preset: Annotated[str, typer.Option(help="glm-5 or deepseek-v3.2.")] = "glm-5",
    size: Annotated[str, typer.Option(help="tiny or small.")] = "small",
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    vocab_size: Annotated[int, typer.Option(help="Entries of the tokenizer.")] = 4096,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    field: Annotated[
        list[str] | None,
        typer.Option(help="Replace a config field, for example --field num_hidden_layers=24."),
    ] = None,
) -> None:
    """Make a small DSA checkpoint with random weights and a real tokenizer."""
    from sglang_indexcache.demo_model import ModelSpec, make_model

    overrides = dict(_parse_field(text) for text in field or [])
    spec = ModelSpec(preset, size, seed, vocab_size, dtype, overrides)
    with out.status(f"making {folder} ..."):
        count = make_model(spec, folder)
    out.print(f"wrote {folder}: {preset} shape, {count / 1e6:.1f} M parameters, random weights")


def _parse_field(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise IndexCacheError(f"--field wants name=value, got {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


@app.command("doctor", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@_reporting
def doctor_command(context: typer.Context) -> None:
    """Say what a server started with these flags would do, without loading weights.

    Takes the flags of `python -m sglang.launch_server`, for example: indexcache doctor
    --model-path MODEL --attention-backend indexcache --indexcache-pattern 1/4
    """
    from sglang_indexcache.runtime.doctor import examine

    if not examine(context.args, out):
        raise typer.Exit(1)


@app.command("demo")
@_reporting
def demo_command(
    folder: Annotated[Path, typer.Option(help="For the logs.")] = Path(".demo"),
) -> None:
    """Serve a small checkpoint with every indexer and with a quarter of them, side by side."""
    from sglang_indexcache.demo import run

    folder.mkdir(parents=True, exist_ok=True)
    run(folder, out)


# -- kernels -----------------------------------------------------------------------------------


@app.command("kernels")
@_reporting
def kernels_command() -> None:
    """Say which implementation of every kernel would run on this machine, and why."""
    from sglang_indexcache.kernels.dispatch import Machine
    from sglang_indexcache.kernels.report import print_table

    print_table(Machine.here(), out)


@app.command("build-kernels")
@_reporting
def build_kernels_command(
    show: Annotated[
        bool, typer.Option("--show", help="Print the registers and spills of every kernel.")
    ] = False,
) -> None:
    """Compile the CUDA kernels for Hopper (sm_90a) ahead of their first use; needs no GPU."""
    from sglang_indexcache.kernels.cuda.command import build_kernels

    build_kernels(out, show=show)


# -- pattern search ----------------------------------------------------------------------------

for _name, _command in COMMANDS.items():
    app.command(_name)(_reporting(_command))

# -- training ----------------------------------------------------------------------------------

register_training(app, _reporting)

# -- benchmarks and planning -------------------------------------------------------------------

register_bench(app, _reporting)


if __name__ == "__main__":
    app()
