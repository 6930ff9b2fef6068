"""How much there is to learn: commands, options and an example of each command."""

from __future__ import annotations

import shlex

import pytest

from tests.cli.test_help import COMMANDS

MOST_COMMANDS = 21
"""May only go down."""
MOST_PARAMETERS = 154
"""Options and arguments of all commands. To go down to 140, and never up."""
OWN_HELP = {"help", "install_completion", "show_completion"}

WITHOUT_EXAMPLE = {
    *("bench replay", "bench plan"),
}
"""Commands whose help is still to get one. None may be added."""


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
    if name in WITHOUT_EXAMPLE:
        return
    assert found, f"the help of {name} has no example"
    assert before.lower().endswith("example: ")
    ours = shlex.split(example.strip())
    known = {flag for parameter in command.params for flag in parameter.opts}
    flags = {word for word in ours[: (*ours, "--").index("--")] if word.startswith("-")}
    if not command.context_settings.get("ignore_unknown_options"):
        assert flags <= known, f"{name} has no {flags - known}"
