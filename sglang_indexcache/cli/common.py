"""Parts that the command groups share: reporting of errors, and options of several commands."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.console import Console
from typer import Option
from typer.core import TyperCommand, TyperGroup

from sglang_indexcache.errors import IndexCacheError, SettingsError

if TYPE_CHECKING:
    from sglang_indexcache.lab.client.http import Client

out = Console()

EXTRAS = {
    "server": "serve",
    "search": "lab",
    "eval": "eval",
    "bench": "eval",
    "patterns": "eval",
    "heal": "lab",
    "kernels": "kernels",
}
"""Extra of the package with the dependencies of each command group, except SGLang itself."""


class _PlainFlags:
    """Mixin that shows flags without a type in the help, where typer 0.29 writes ``<bool>``."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, including ``--help``."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class Command(_PlainFlags, TyperCommand):
    """Class of our commands, used as ``@app.command(NAME, cls=Command)``."""


class CommandGroup(_PlainFlags, TyperGroup):
    """Class of our command groups."""


class Reporting(CommandGroup):
    """Command group that turns errors that a user can fix into one line and exit code 1.

    These are our errors, packages that are not installed, and files that cannot be read or written.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except IndexCacheError as error:
            message = str(error)
        except ModuleNotFoundError as error:
            package = (error.name or str(error)).partition(".")[0]
            if package == "sglang_indexcache":
                raise
            message = _missing(package, ctx.invoked_subcommand)
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of our output has closed the pipe
                raise
            message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        typer.secho(f"indexcache: error: {message}", err=True, fg="red")
        raise typer.Exit(1)


def _missing(package: str, group: str | None) -> str:
    extra = "serve" if package == "sglang" else EXTRAS.get(group or "", "lab")
    return (
        f"this command needs {package}, which is not installed. In the folder that this package "
        f"was installed from: pip install '.[{extra}]'"
    )


def group(help: str) -> typer.Typer:
    """Return a command group."""
    return typer.Typer(
        cls=CommandGroup, help=help, no_args_is_help=True, pretty_exceptions_enable=False
    )


# -- options that mean the same everywhere -----------------------------------------------------


def writable(folder: Path | None) -> Path | None:
    """Check that the folder of ``--output`` can be written, before anything else.

    Raises:
        OutputError: no file can be written in the folder.
    """
    if folder is not None:
        from sglang_indexcache.lab.runs.identity import check_writable

        check_writable(folder)
    return folder


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the options of a YAML file the defaults of the command that is being parsed."""
    if path is None:
        return None
    import yaml

    from sglang_indexcache.library.files import parse_yaml

    try:
        options = parse_yaml(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise IndexCacheError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(options, dict):
        raise IndexCacheError(f"--config {path} must hold options, such as 'seed: 1'")
    parameters = {str(parameter.name): parameter for parameter in context.command.params}
    defaults: dict[str, Any] = {}
    for name, value in options.items():
        option = parameters.get(str(name).removeprefix("--").replace("-", "_"))
        if option is None or option.name in (None, "config", "help"):
            raise IndexCacheError(
                f"--config {path}: {name!r} is no option of `{context.command_path}`"
            )
        if option.name in defaults:
            raise IndexCacheError(f"--config {path}: {name!r} is given twice. Give it once.")
        several = getattr(option, "multiple", False) and not isinstance(value, list)
        defaults[str(option.name)] = [value] if several else value
    context.default_map = defaults
    return path


def _figure_format(value: str) -> str:
    from sglang_indexcache.lab.runs.plots import FORMATS

    formats = [suffix.removeprefix(".") for suffix in FORMATS]
    if value not in formats:
        raise SettingsError(f"--figures is {', '.join(formats)}, got {value!r}")
    return value


DOCUMENTS = (
    "a file of rows (.jsonl, .json, .csv, .parquet) or of text, a folder of them, or 'machine' for "
    "the Python sources of this machine."
)
LENGTH = "tokens, such as 4096, 16Ki (1024s) or 200K (1000s)."
"""Help text for options that take a number of tokens."""
SERVERS = "Servers that run"
"""Panel of the help with the servers' addresses and keys."""

# Options are declared before the commands, one entry for each; the formatter would spread an entry
# over ten lines.
# fmt: off
Model = Annotated[Path, Option("--model", "--model-path", metavar="FOLDER", help=
    "The checkpoint's folder.")]
Output = Annotated[Path, Option("--output", "-o", metavar="FOLDER", callback=writable, help=
    "A folder for everything that is written.")]
Seed = Annotated[int, Option("--seed", min=0, metavar="NUMBER", help=
    "Seed of everything that is drawn at random.")]
Config = Annotated[Path | None, Option(
    "--config", metavar="FILE", is_eager=True, callback=_read_config, help=
    "A YAML file of these options, such as 'seed: 1'. The command line wins.")]
Urls = Annotated[list[str] | None, Option("--url", metavar="URL", rich_help_panel=SERVERS, help=
    "Base URL of a running server. Repeat it.")]
# Not OPENAI_API_KEY, which SGLang's benchmark reads: a key for another service must not be sent to
# a server by accident.
ApiKey = Annotated[str | None, Option(
    "--api-key", envvar="SGLANG_API_KEY", metavar="KEY", rich_help_panel=SERVERS, help=
    "API key of the servers at --url. Better in the variable: others on this machine can read a "
    "command line.")]
AdminApiKey = Annotated[str | None, Option(
    "--admin-api-key", envvar="SGLANG_ADMIN_API_KEY", metavar="KEY", rich_help_panel=SERVERS, help=
    "Admin API key of the servers at --url, if they have one: it is needed to switch patterns "
    "and to flush caches.")]
Figures = Annotated[str, Option(
    "--figures", metavar="png|pdf|svg", callback=_figure_format, help=
    "Format of the figures: PDF and SVG are for papers.")]
Json = Annotated[bool, Option("--json", help=
    "Print the same as one JSON document. The exit code stays.")]
# fmt: on


# -- values ------------------------------------------------------------------------------------


def connect(
    urls: Iterable[str] | None,
    api_key: str | None,
    admin_api_key: str | None = None,
    timeout: float = 600.0,
) -> list[Client]:
    """Connect to each server. Only these clients get the API keys, so that nothing records them.

    Raises:
        SettingsError: a URL is malformed.
    """
    from sglang_indexcache.lab.client.http import Client

    keys = {"api_key": api_key, "admin_api_key": admin_api_key}
    return [Client(_checked(url), timeout, **keys) for url in urls or ()]


def _checked(url: str) -> str:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    path = parts.path.rstrip("/").removesuffix("/v1")
    base = f"{parts.scheme}://{parts.netloc}{path}"
    if not parts.hostname or parts.scheme not in ("http", "https"):
        raise SettingsError(f"--url wants the address of a server, http://HOST:PORT, got {url!r}")
    if base != url.rstrip("/"):
        raise SettingsError(f"--url {url} is not the base URL of a server. Did you mean {base}?")
    return url


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document for programs, without colours or line breaks for the terminal."""
    typer.echo(json.dumps(document, indent=1, ensure_ascii=False))
