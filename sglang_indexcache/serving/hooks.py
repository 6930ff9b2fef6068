"""Wrap SGLang's functions in this process, through SGLang's own hook registry.

If the registry cannot wrap a function, it only logs that; here it is an error. While plugins load,
SGLang has not imported everything yet. So SGLang wraps functions with ``at_start`` after all
plugins have loaded, and :func:`check` says later whether that succeeded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from sglang_indexcache.errors import UnsupportedEngineError

_ours: set[str] = set()
"""Functions that this process has wrapped, or has left to SGLang to wrap."""


def around(target: str, function: Callable[..., Any], *, at_start: bool = False) -> None:
    """Make ``target`` call ``function(original, ...)`` instead; safe to call again.

    Raises:
        UnsupportedEngineError: SGLang could not wrap it.
    """
    _install(target, function, "AROUND", at_start)


def after(target: str, function: Callable[..., Any], *, at_start: bool = False) -> None:
    """Call ``function(result, ...)`` whenever ``target`` returns; otherwise like :func:`around`."""
    _install(target, function, "AFTER", at_start)


def check(targets: Collection[str] | None = None) -> None:
    """Check that SGLang wrapped the functions that were left to it.

    Raises:
        UnsupportedEngineError: names the functions that it did not wrap.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    expected = _ours if targets is None else set(targets)
    if missing := sorted(expected - HookRegistry._patched):
        raise UnsupportedEngineError(
            f"SGLang did not wrap {', '.join(missing)}; its log says why. Is another plugin in the "
            "way?"
        )


def _install(target: str, function: Callable[..., Any], kind: str, at_start: bool) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if target in _ours:
        return
    if target in HookRegistry._patched:  # SGLang wraps a function only once
        raise UnsupportedEngineError(
            f"another plugin has wrapped {target} before IndexCache could. Load IndexCache first, "
            "or leave the other out (SGLANG_PLUGINS)."
        )
    HookRegistry.register(target, function, HookType[kind])
    if not at_start:
        HookRegistry.apply_hooks()
        check({target})
    _ours.add(target)
