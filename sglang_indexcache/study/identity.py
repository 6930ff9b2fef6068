"""Which run a folder belongs to. A run is only ever continued with what it was begun with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sglang_indexcache.errors import IndexCacheError
from sglang_indexcache.support.files import check_writable, write_json

GIVEN = "given"
"""Key of an identity for the options that led to it: they explain a difference and make none."""
_SHORT = 100
_HASH = re.compile(r"[0-9a-f]{40,}")


def differences(then: Mapping[str, Any], now: Mapping[str, Any], of: str = "") -> Iterator[str]:
    """What differs between two identities, by name; no long values and no hashes."""
    for name in sorted({*then, *now}):
        old, new = then.get(name), now.get(name)
        if old == new:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{of}{name} ")
        elif max(len(repr(old)), len(repr(new))) > _SHORT or _HASH.fullmatch(str(new)):
            yield f"{of}{name}"
        else:
            yield f"{of}{name} ({old!r} then, {new!r} now)"


def _without_options(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in identity.items() if name != GIVEN}


def check_same(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    path: Path,
    kind: str,
    error: type[IndexCacheError],
) -> None:
    """Refuse to continue another run.

    Args:
        then: what the run was begun with; under :data:`GIVEN`, if anything, by which options.
        now: what is asked for.
        kind: what a run is called in messages, such as "search".
        error: what to raise.

    Raises:
        IndexCacheError: as ``error``: the two differ.
    """
    different = list(differences(_without_options(then), _without_options(now)))
    if different:
        if GIVEN in then and GIVEN in now:
            different += differences(then[GIVEN], now[GIVEN])
        raise error(
            f"{path} belongs to another {kind}; different: {'; '.join(different)}. "
            "Give the same options to continue it, or another --output."
        )


def claim(path: Path, identity: Mapping[str, Any], kind: str, error: type[IndexCacheError]) -> bool:
    """Make the JSON file at ``path`` say what is run beside it, or find that it says the same.

    Args:
        path: of the file; made with its folder if it is not there.
        identity: what the run was begun with, JSON values.

    Returns:
        Whether the run was begun before.

    Raises:
        IndexCacheError: as ``error``: the file belongs to another run, or is damaged.
        OutputError: the folder cannot be written.
    """
    check_writable(path.parent)
    if not path.exists():
        write_json(path, dict(identity))
        return False
    try:
        then = json.loads(path.read_text())
    except ValueError as damaged:
        raise error(f"{path} is damaged. Give another --output.") from damaged
    if not isinstance(then, dict):
        raise error(f"{path} is damaged. Give another --output.")
    check_same(then, json.loads(json.dumps(identity)), path=path, kind=kind, error=error)
    return True
