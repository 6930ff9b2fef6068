"""Needs of several of the plugin's tests in the process that they run in."""

from __future__ import annotations

import pytest

from sglang_indexcache.serving import hooks, process
from sglang_indexcache.serving.options import OPTIONS


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in OPTIONS:
        monkeypatch.delenv(option.variable, raising=False)


@pytest.fixture
def own_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave SGLang's registry of hooks as it was; what a test wraps, it restores itself."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_patched", set(HookRegistry._patched))
    monkeypatch.setattr(HookRegistry, "_hooks", HookRegistry._hooks.copy())
    monkeypatch.setattr(hooks, "_ours", set())
    monkeypatch.setattr(process, "_process", None)
