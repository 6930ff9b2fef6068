"""How much there is to learn: commands, options and an example of each command."""

from __future__ import annotations

import shlex

import pytest

from tests.cli.test_help import COMMANDS

MOST_COMMANDS = 21
MOST_PARAMETERS = 140
"""Options and arguments of all commands together."""
OWN_HELP = {"help", "install_completion", "show_completion"}


def parameters(name: str) -> list[str]:
    return [one.name for one in COMMANDS[name].params if one.name not in OWN_HELP]


def test_commands_and_options_are_few() -> None:
    assert len(COMMANDS) <= MOST_COMMANDS
    assert sum(len(parameters(name)) for name in COMMANDS) <= MOST_PARAMETERS


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_that_parses(name: str) -> None:
    command = COMMANDS[name]
    text = " ".join(f"{command.help or ''} {command.epilog or ''}".split())
    before, found, example = text.partition(f"indexcache {name}")
    assert found, f"the help of {name} has no example"
    assert before.lower().endswith("example: ")
    ours = shlex.split(example.strip())
    known = {flag for parameter in command.params for flag in parameter.opts}
    flags = {word for word in ours[: (*ours, "--").index("--")] if word.startswith("-")}
    if not command.context_settings.get("ignore_unknown_options"):
        assert flags <= known, f"{name} has no {flags - known}"
