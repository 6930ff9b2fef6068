"""Command lines in scripts and pages, held against the commands that there are."""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import dataclass
from functools import cache
from typing import Any

import click
import pytest

FLAG = re.compile(r"(?<=\s)--[a-z][a-z0-9-]*")
INDENTED = re.compile(r"^    (?:\$ )?((?:indexcache|sglang|python -m) .*(?:\\\n.*)*)", re.MULTILINE)
FENCED = re.compile(r"^```(?:bash|console|sh)?\n(.*?)^```", re.DOTALL | re.MULTILINE)


def lines_of(text: str) -> list[str]:
    """Shell text as one command a line: continuations joined, comments and prompts gone."""
    joined = re.sub(r"\\\n\s*", " ", text)
    bare = (re.sub(r"(^|\s)#.*", "", line).strip() for line in joined.splitlines())
    return [line.removeprefix("$ ").removesuffix(";;").strip() for line in bare if line]


def shell_in(page: str) -> str:
    """The fenced shell blocks of a page in Markdown, and indented lines that are commands."""
    return "\n".join([*FENCED.findall(page), *INDENTED.findall(page)])


def server_lines(text: str) -> list[str]:
    """Return the lines that start SGLang."""
    starts = ("sglang serve", "python -m sglang.launch_server")
    return [line for line in lines_of(text) if line.startswith(starts)]


@dataclass(frozen=True)
class CommandLine:
    """One call of ``indexcache``."""

    words: tuple[str, ...]

    def unknown(self, app: Any) -> list[str]:
        """Words and flags that the command does not have; SGLang's own flags of doctor pass."""
        command, words = app, list(self.words[1:])
        while isinstance(command, click.Group) or hasattr(command, "commands"):
            if not words or words[0].startswith("-"):
                break
            if words[0] not in command.commands:
                return [" ".join(self.words[:3])]
            command = command.commands[words.pop(0)]
        if "--" in words:
            words = words[: words.index("--")]
        options = {name for parameter in command.params for name in parameter.opts} | {"--help"}
        options |= {name for parameter in command.params for name in parameter.secondary_opts}
        if command.context_settings.get("ignore_unknown_options"):
            return []
        flags = (word.split("=")[0] for word in words if re.match(r"--?[a-z]", word))
        return [flag for flag in flags if flag not in options]


def indexcache_lines(text: str) -> list[CommandLine]:
    """Return every call of ``indexcache``."""
    return [
        CommandLine(tuple(shlex.split(line)))
        for line in lines_of(text)
        if line.startswith("indexcache ")
    ]


@cache
def engine_flags() -> frozenset[str]:
    """Return the flags of ``sglang serve`` with the plugin; without SGLang the test is skipped."""
    pytest.importorskip("sglang")
    from sglang.srt.server_args import ServerArgs

    from sglang_indexcache.serving.options import OPTIONS

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return frozenset(parser._option_string_actions) | {option.flag for option in OPTIONS}


def unknown_flags(line: str) -> list[str]:
    """Flags that SGLang does not take; a flag may be cut short, as argparse allows."""
    flags = engine_flags()
    return [
        flag
        for flag in FLAG.findall(line)
        if flag not in flags and sum(known_flag.startswith(flag) for known_flag in flags) != 1
    ]
