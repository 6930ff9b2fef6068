"""What the command groups share: how errors are told, and how a docstring becomes a command."""

from __future__ import annotations

import errno
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.console import Console
from typer.core import TyperGroup

from sglang_indexcache.errors import IndexCacheError, SettingsError
from sglang_indexcache.support.files import check_writable

if TYPE_CHECKING:
    from sglang_indexcache.ask.client import Client

out = Console()

EXTRAS = {
    "server": "serve",
    "search": "search",
    "eval": "eval",
    "bench": "plots",
    "heal": "heal",
    "kernels": "kernels",
    "demo": "search",
}
"""Which extra of the package brings what a command group needs, but for SGLang itself."""


class Reporting(TyperGroup):
    """Turns errors that a user can mend into one line and exit code 1.

    Those are ours, packages that are not installed, and files that cannot be read or written.
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
            if error.errno == errno.EPIPE:  # whoever read our output has gone
                raise
            message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        typer.secho(f"indexcache: error: {message}", err=True, fg="red")
        raise typer.Exit(1)


def _missing(package: str, group: str | None) -> str:
    extra = "serve" if package == "sglang" else EXTRAS.get(group or "", "all")
    return (
        f"this command needs {package}, which is not installed: "
        f"pip install 'sglang-indexcache[{extra}]'"
    )


def group(help: str) -> typer.Typer:
    """A command group."""
    return typer.Typer(help=help, no_args_is_help=True, pretty_exceptions_enable=False)


# -- options that mean the same everywhere -----------------------------------------------------


def writable(folder: Path | None) -> Path | None:
    """Try the folder of ``--output`` first: the option below calls it.

    Raises:
        OutputError: no file can be written there.
    """
    if folder is not None:
        check_writable(folder)
    return folder


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the options of a YAML file the defaults of the command that is being parsed."""
    if path is None:
        return None
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise IndexCacheError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise IndexCacheError(f"--config {path} must hold options, such as 'seed: 1'")
    known = {str(one.name): one for one in context.command.params}
    defaults: dict[str, Any] = {}
    for name, value in found.items():
        option = known.get(str(name).removeprefix("--").replace("-", "_"))
        if option is None or option.name in (None, "config", "help"):
            raise IndexCacheError(
                f"--config {path}: {name!r} is no option of `{context.command_path}`"
            )
        several = getattr(option, "multiple", False) and not isinstance(value, list)
        defaults[str(option.name)] = [value] if several else value
    context.default_map = defaults
    return path


Output = Annotated[Path, typer.Option("--output", "-o", callback=writable)]
OutputIfAny = Annotated[Path | None, typer.Option("--output", "-o", callback=writable)]
Config = Annotated[Path | None, typer.Option(is_eager=True, callback=_read_config)]
# Not OPENAI_API_KEY, which SGLang's benchmark reads: a key for somebody else's service should not
# be sent to a server by accident.
ApiKey = Annotated[str | None, typer.Option(envvar="SGLANG_API_KEY")]
AdminApiKey = Annotated[str | None, typer.Option(envvar="SGLANG_ADMIN_API_KEY")]
Json = Annotated[bool, typer.Option("--json")]

SHARED = """
Options:
    model (FOLDER): The checkpoint's folder.
    output (FOLDER): A folder for everything that is written.
    seed (NUMBER): Seed of everything that is drawn at random.
    config (FILE): A YAML file of these options, such as 'seed: 1'. The command line wins.
    as_json: Print the same as one JSON document. The exit code stays.
Servers that run:
    url (URL): Base URL of the server.
    api_key (KEY): API key of the servers at --url. Better in the variable: others on this machine
        can read a command line.
    admin_api_key (KEY): Admin API key of the servers at --url, if they have one: it is needed to
        switch patterns and to flush caches.
"""
"""What they mean, where a command says nothing else."""


# -- a command from its docstring --------------------------------------------------------------

_HEADING = re.compile(r"(\w[\w ]*):")
_ENTRY = re.compile(r" {4}(\w+)(?: \((.+?)\))?: (.+)")


@dataclass
class _Told:
    """What a docstring says of a parameter: its panel in the help, its placeholder, its help."""

    panel: str
    metavar: str | None
    help: str


def command(
    group: typer.Typer, name: str, shared: str = "", **settings: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a function to a command group; its docstring says what its parameters mean.

    Behind the command's help stand sections of ``name (METAVAR): sentence``. Each is a panel of the
    help, but for "Options", which are in none, and "Arguments", which have no flag. For parameters
    that it does not name, the sections of ``shared`` and then of :data:`SHARED` count.
    """

    def add(function: Callable[..., None]) -> Callable[..., None]:
        help, own = _sections(inspect.getdoc(function) or "")
        told = _sections(SHARED)[1] | _sections(shared)[1] | own

        def run(**given: Any) -> None:
            function(**given)

        signature = inspect.signature(function, eval_str=True)
        parameters = [_described(one, told) for one in signature.parameters.values()]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        group.command(name, help=help, **settings)(run)
        return function

    return add


def _sections(text: str) -> tuple[str, dict[str, _Told]]:
    """What stands before the first section, and the entries of all of them."""
    before, found, panel = [], {}, ""
    for line in text.splitlines():
        if heading := _HEADING.fullmatch(line):
            panel = heading[1]
        elif entry := _ENTRY.fullmatch(line):
            name, metavar, help = entry.groups()
            found[name] = _Told(panel, metavar, help)
        elif panel:
            found[name].help += f" {line.strip()}"
        else:
            before.append(line)
    return "\n".join(before).strip(), found


def _described(parameter: inspect.Parameter, told: Mapping[str, _Told]) -> inspect.Parameter:
    """The parameter as typer reads it."""
    kind = parameter.annotation
    if kind is not typer.Context:
        said = told[parameter.name]
        if hasattr(kind, "__metadata__"):
            kind, info = kind.__origin__, copy(kind.__metadata__[0])
        elif kind is bool:  # without a --no-... of its own
            info = typer.Option("--" + parameter.name.replace("_", "-"))
        else:
            info = typer.Argument() if said.panel == "Arguments" else typer.Option()
        info.metavar, info.help = said.metavar, said.help
        info.rich_help_panel = None if said.panel in ("Options", "Arguments") else said.panel
        kind = Annotated[kind, info]
    return parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY)


# -- values ------------------------------------------------------------------------------------


def connect(
    urls: Iterable[str] | None,
    api_key: str | None,
    admin_api_key: str | None = None,
    timeout: float = 600.0,
) -> list[Client]:
    """A client of each server. The keys go no further than these, so that nothing records them.

    Raises:
        SettingsError: a URL that is none.
    """
    from sglang_indexcache.ask.client import Client

    keys = {"api_key": api_key, "admin_api_key": admin_api_key}
    return [Client(_checked(url), timeout, **keys) for url in urls or ()]


def _checked(url: str) -> str:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    where = parts.path.rstrip("/").removesuffix("/v1")
    meant = f"{parts.scheme}://{parts.netloc}{where}"
    if not parts.hostname or parts.scheme not in ("http", "https"):
        raise SettingsError(f"--url wants the address of a server, http://HOST:PORT, got {url!r}")
    if meant != url.rstrip("/"):
        raise SettingsError(f"--url {url} is not the base URL of a server. Did you mean {meant}?")
    return url


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document that programs read: no colours, and no lines broken to fit a terminal."""
    typer.echo(json.dumps(document, indent=1, ensure_ascii=False))


def name_and_value(text: str, option: str) -> tuple[str, str]:
    """The two halves of ``NAME=VALUE``.

    Raises:
        IndexCacheError: naming ``option``, unless ``text`` has that form.
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise IndexCacheError(f"{option} wants NAME=VALUE, got {text!r}")
    return name, value
