"""Compilers that made wrong code for Hopper, by their full version.

What they compile may be asked for by name, but nothing takes it by default: the same source can be
right from one build of ptxas and silently wrong from the next. Only versions somebody saw fail are
listed, each with where; that a version is absent says nothing in its favour, so the grid
(``indexcache kernels check``) is to be run for every compiler that builds.
"""

import re
from typing import TypeAlias

Version: TypeAlias = tuple[int, ...]
"""Of nvcc or ptxas, for example ``(13, 0, 88)``."""

KNOWN_BAD: dict[Version, str] = {
    (12, 8, 93): "its ptxas gave wrong sums and wrote outside of shared memory (fla-org/"
    "flash-linear-attention #1262)",
    (13, 0, 88): "its ptxas wrote outside of shared memory (fla-org/flash-linear-attention #1262)",
}
"""For sm_90a: version -> what it did to whom. 13.1.80 made right code of the same PTX."""


def version_said(words: str) -> Version | None:
    """The version in what ``nvcc --version`` or ``ptxas --version`` prints, or None."""
    found = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", words)
    return None if found is None else tuple(map(int, found.groups()))


def dotted(version: Version) -> str:
    """As people write it."""
    return ".".join(map(str, version))


def doubt(tool: str, version: Version) -> str | None:
    """Why nothing that ``tool`` of this version compiled may be a default, or None."""
    why = KNOWN_BAD.get(version)
    if why is None:
        return None
    return f"{tool} {dotted(version)} is known to miscompile for Hopper: {why}; use another release"
