"""README.md and the guides, with links that work away from the repository too.

A package index shows the README without the files beside it, and a wheel holds the guides alone:
there a link to any other file is dead. With ``Repository`` among ``[project.urls]`` links lead
there; without, the text of a link stays, with the place of its page in the source archive.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

GUIDES = ("docs/*.md", "csrc/README.md")
_LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!https?://)([^)]+)\)")


def portable(
    text: str, repository: str | None, folder: str = "", there: Collection[str] = ()
) -> str:
    """``text`` in Markdown without a link that needs a file that is not there.

    Args:
        folder: where the text is in the repository.
        there: files of the repository that go where the text goes.
    """

    def link(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        path, _, anchor = target.partition("#")
        if not path:  # a place in this very page
            return found[0]
        path = posixpath.normpath(posixpath.join(folder, path))
        if path in there:
            return found[0]
        if repository is None:
            return "" if picture else f"{words} (`{path}`)"
        address = f"{repository.rstrip('/')}/{'raw' if picture else 'blob'}/HEAD/{path}"
        return f"{picture}[{words}]({address}{'#' + anchor if anchor else ''})"

    return _LINK.sub(link, text)


class ReadmeHook(MetadataHookInterface):
    """Hook that hatchling asks for the metadata that ``pyproject.toml`` calls dynamic."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set ``readme``."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": portable(text, repository),
        }


class GuidesHook(BuildHookInterface):
    """Hook that hatchling asks before it builds a wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Put the guides into the package; an editable one reads them where they are."""
        if version == "editable":
            return
        repository, root = self.metadata.core.urls.get("Repository"), Path(self.root)
        found = (path for pattern in GUIDES for path in root.glob(pattern))
        pages = sorted(path.relative_to(root).as_posix() for path in found)
        self._made = TemporaryDirectory()
        for page in pages:
            text = (root / page).read_text(encoding="utf-8")
            made = Path(self._made.name) / page.replace("/", "-")
            made.write_text(portable(text, repository, posixpath.dirname(page), pages))
            build_data["force_include"][str(made)] = f"sglang_indexcache/{page}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Leave nothing behind."""
        if version != "editable":
            self._made.cleanup()
