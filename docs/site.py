"""A hook of mkdocs: pages keep their places in the repository, so links between them work."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from hatch_build import portable  # noqa: E402
from sglang_indexcache import __all__ as public_names  # noqa: E402

API = "docs/api.md"
PUBLISHED = {".md", ".png", ".svg", ".json", ".yaml", ".ipynb"}
_ROLE = re.compile(r":(?:class|func|meth|data|mod|attr|exc):(?=<code>|`)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the folder ``docs/`` by every page and figure of the repository, at its own path."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if PurePosixPath(name).suffix in PUBLISHED and not name.startswith((".", "tests/fakes")):
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    # Written here, so that a new public name is on the page.
    directives = "\n".join(f"::: sglang_indexcache.{name}\n" for name in sorted(public_names))
    files.append(File.generated(config, API, content=f"# Public names\n\n{directives}"))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to what the site lacks (code, folders) into text, or lead them to the forge."""
    folder = str(PurePosixPath(page.file.src_uri).parent)
    return portable(markdown, config.repo_url or None, folder, {file.src_uri for file in files})


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Leave out the roles of Sphinx, which Markdown shows as text."""
    return _ROLE.sub("", html) if page.file.src_uri == API else html
