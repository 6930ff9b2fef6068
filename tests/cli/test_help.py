"""The help of every command: quick to come, in whole sentences, with an example."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from sglang_indexcache import cli
from sglang_indexcache.cli import app
from sglang_indexcache.cli.common import SERVERS

LIGHT = {"typer", "rich", "pygments", "markdown_it", "mdurl", "shellingham", "sglang_indexcache"}
"""What printing a help text may load beside the standard library."""


def commands(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}".strip(), command


COMMANDS = dict(commands(typer.main.get_command(app)))


def test_no_command_is_heavy_to_import() -> None:
    code = "import sys, sglang_indexcache.cli; print(*{m.split('.')[0] for m in sys.modules})"
    modules = subprocess.check_output([sys.executable, "-c", code], text=True)
    bare = subprocess.check_output(
        [sys.executable, "-c", code.replace("sglang_indexcache.cli", "os")], text=True
    )  # what an installation loads at every start
    foreign = set(modules.split()) - set(bare.split()) - set(sys.stdlib_module_names)
    assert foreign <= LIGHT | {"annotated_doc"}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_whole_sentences(name: str) -> None:
    command = COMMANDS[name]
    texts = {"": (command.help or "").partition("\n\n")[0]} | {
        parameter.name: getattr(parameter, "help", None) or "" for parameter in command.params
    }
    for parameter, text in texts.items():
        if parameter == "help":
            continue
        assert text, f"{name}: {parameter} has no help"
        assert text.rstrip().endswith((".", "?")), f"{name}: {parameter}: {text!r}"
        assert not text.startswith("Of "), f"{name}: {parameter}: {text!r}"
        assert text[0].isupper() or text[0] in "`'.", f"{name}: {parameter}: {text!r}"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_that_parses(name: str) -> None:
    command = COMMANDS[name]
    text = " ".join(f"{command.help or ''} {command.epilog or ''}".split())
    before, example_begins, example = text.partition(f"indexcache {name}")
    assert example_begins, f"the help of {name} has no example"
    assert before.lower().endswith("example: ")
    ours = shlex.split(example.strip())
    options = {flag for parameter in command.params for flag in parameter.opts}
    flags = {word for word in ours[: (*ours, "--").index("--")] if word.startswith("-")}
    if not command.context_settings.get("ignore_unknown_options"):
        assert flags <= options, f"{name} has no {flags - options}"


@pytest.mark.parametrize("name", COMMANDS)
def test_flags_have_no_type_and_a_server_one_panel(name: str) -> None:
    help_text = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "120"}).output
    assert "--help" in help_text
    assert "<bool>" not in help_text
    panels = {
        parameter.rich_help_panel
        for parameter in COMMANDS[name].params
        if parameter.name in ("url", "api_key", "admin_api_key")
    }
    assert panels in (set(), {SERVERS})


def test_a_flag_is_found_where_it_is_declared() -> None:
    source = "".join(path.read_text() for path in Path(cli.__file__).parent.glob("*.py"))
    for command in COMMANDS.values():
        for option in command.params:
            assert all(f'"{flag}"' in source for flag in option.opts if flag.startswith("-"))


def test_a_model_is_named_in_one_way_by_every_command() -> None:
    """SGLang's own flag is taken, too."""
    spellings = [option.opts for command in COMMANDS.values() for option in command.params]
    of_models = [names for names in spellings if {"--model", "--model-path"} & {*names}]
    assert len(of_models) > 8
    assert all(names == ["--model", "--model-path"] for names in of_models)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_the_example_of_a_config_is_an_option_of_the_command(command: Any) -> None:
    options = {option.name: option for option in command.params}
    if "config" in options:
        [example] = re.findall(r"such as '(\w+): ", options["config"].help)
        assert example in options
