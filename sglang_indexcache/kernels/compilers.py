"""Compilers of our CUDA kernels for Hopper, by their full version: whom to trust with a default.

The same source can be right from one build of ptxas and silently wrong from the next. What others
than those in :data:`GOOD` made can be asked for by name; ``--indexcache-kernels auto`` never takes
it.
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
"""For sm_90a: version -> what it did to whom."""

GOOD: dict[Version, str] = {
    (
        13,
        1,
        80,
    ): "made right code of the PTX that 13.0.88 got wrong (the same report), and of these "
    "kernels code without spills that passes tests/kernels/test_cuda_build.py",
}
"""For sm_90a: version -> the evidence. No card has run what any of them compiled."""


def version_said(words: str) -> Version | None:
    """The version in what ``nvcc --version`` or ``ptxas --version`` prints, or None."""
    found = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", words)
    return None if found is None else tuple(map(int, found.groups()))


def dotted(version: Version) -> str:
    """As people write it."""
    return ".".join(map(str, version))


def doubt(version: Version) -> str | None:
    """Why ``auto`` takes nothing that nvcc of this version compiled, or None."""
    if version in GOOD:
        return None
    why = KNOWN_BAD.get(version)
    found = f"miscompiles for Hopper: {why}" if why else "is not among those that were checked"
    good = " or ".join(map(dotted, GOOD))
    return f"nvcc {dotted(version)} {found} (set CUDA_HOME to a toolkit with nvcc {good})"
