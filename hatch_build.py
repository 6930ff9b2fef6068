"""The package's long description: README.md, with links that work away from the repository too.

A package index shows the README without the files beside it, where a relative link is dead. With
``Repository`` among ``[project.urls]`` links lead there; without, the text of a link stays, with
the place of its page in the installed package or the source archive.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!https?://)([^)]+)\)")


def portable(text: str, repository: str | None) -> str:
    """``text`` in Markdown without a link that needs a file beside it."""

    def link(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        path, _, anchor = target.partition("#")
        if not path:  # a place in this very page
            return found[0]
        if repository is None:
            return "" if picture else f"{words} (`{path}`)"
        address = f"{repository.rstrip('/')}/{'raw' if picture else 'blob'}/HEAD/{path}"
        return f"{picture}[{words}]({address}{'#' + anchor if anchor else ''})"

    return _LINK.sub(link, text)


class ReadmeHook(MetadataHookInterface):
    """What hatchling asks for the metadata that ``pyproject.toml`` calls dynamic."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set ``readme``."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": portable(text, repository),
        }
