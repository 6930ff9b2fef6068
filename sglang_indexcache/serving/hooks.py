"""Wrap a function of SGLang in this process, through SGLang's own hook registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_indexcache.errors import UnsupportedEngineError


def around(target: str, function: Callable[..., Any]) -> None:
    """Call ``function(original, ...)`` in place of ``target``; safe to call again.

    Args:
        target: dotted name.
        function: receives the original first.

    Raises:
        UnsupportedEngineError: SGLang could not wrap it, which it would only log.
    """
    _install(target, function, "AROUND")


def after(target: str, function: Callable[..., Any]) -> None:
    """Call ``function(result, ...)`` when ``target`` returns; otherwise as :func:`around`."""
    _install(target, function, "AFTER")


def _install(target: str, function: Callable[..., Any], kind: str) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if target in HookRegistry._patched:
        return
    HookRegistry.register(target, function, HookType[kind])
    HookRegistry.apply_hooks()
    if target not in HookRegistry._patched:
        raise UnsupportedEngineError(
            f"SGLang did not wrap {target}; its log says why. Is another plugin in the way?"
        )
