"""Numbers as people write them: token counts such as ``200K``, ``16Ki``, and counted things."""

from __future__ import annotations

import re

from sglang_indexcache.errors import SettingsError, quoted

_FORM = re.compile("0*([1-9][0-9]{0,11})(K|Ki)?")


def parse_length(text: str) -> int:
    """Parse ``200000``, ``200K`` (1000s, as the paper counts) or ``16Ki`` (1024s) tokens.

    Raises:
        SettingsError: the text has another form.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        guess = text.replace("k", "K").replace("I", "i")
        hint = f". Did you mean {guess}?" if _FORM.fullmatch(guess) and guess != text else ""
        raise SettingsError(
            f"a length is a number of tokens like 4096, 200K or 16Ki, got {quoted(text)}{hint}"
        )
    return int(match[1]) * {None: 1, "K": 1000, "Ki": 1024}[match[2]]


def format_length(length: int) -> str:
    """Return a token count in the shortest form that :func:`parse_length` reads."""
    if length >= 1000 and length % 1000 == 0:
        return f"{length // 1000}K"
    if length >= 1024 and length % 1024 == 0:
        return f"{length // 1024}Ki"
    return str(length)


def counted(count: int, name: str) -> str:
    """Return a count with its noun, as in ``1 look`` or ``1,200 looks``."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def points(value: float) -> str:
    """Return ``0.01`` as "1 point"."""
    number = f"{100 * value:g}"
    return f"{number} point{'' if number == '1' else 's'}"
