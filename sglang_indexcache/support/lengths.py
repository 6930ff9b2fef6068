"""Token counts as people write them: ``200K``, ``16Ki``, ``4096``."""

from __future__ import annotations

import re

from sglang_indexcache.errors import SettingsError


def parse_length(text: str) -> int:
    """Tokens from ``200000``, ``200K`` (1000s, as the paper counts) or ``16Ki`` (1024s).

    Raises:
        SettingsError: anything else.
    """
    match = re.fullmatch(r"(\d{1,12})(K|Ki)?", text)
    if match is None or int(match[1]) == 0:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        meant = f" Did you mean {text[:-1]}K?" if re.fullmatch(r"\d{1,12}k", text) else ""
        raise SettingsError(
            f"a length is a number of tokens like 4096, 200K or 16Ki, got {shown!r}.{meant}"
        )
    return int(match[1]) * {None: 1, "K": 1000, "Ki": 1024}[match[2]]


def format_length(length: int) -> str:
    """The shortest of the forms that :func:`parse_length` reads."""
    if length >= 1000 and length % 1000 == 0:
        return f"{length // 1000}K"
    if length >= 1024 and length % 1024 == 0:
        return f"{length // 1024}Ki"
    return str(length)
