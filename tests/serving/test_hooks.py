"""Wrapping SGLang's functions through its own registry."""

from __future__ import annotations

import json
import logging
import sys
from types import ModuleType

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_indexcache.errors import UnsupportedEngineError
from sglang_indexcache.serving import hooks


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch, own_hooks: None) -> ModuleType:
    """Return what is wrapped: the registry also replaces a function wherever it was imported to."""
    module = ModuleType("engine")
    module.dumps, module.loads = lambda value: json.dumps(value), lambda text: json.loads(text)
    monkeypatch.setitem(sys.modules, "engine", module)
    return module


def test_around_and_after_are_installed_once(engine: ModuleType) -> None:
    results = []
    for _ in range(2):
        hooks.around("engine.dumps", lambda original, value: original([value, value]))
        hooks.after("engine.loads", lambda result, *_: results.append(result))
    assert engine.dumps(1) == "[1, 1]"
    assert engine.loads("2") == 2
    assert results == [2]


def test_a_target_that_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    with pytest.raises(UnsupportedEngineError, match=r"did not wrap engine\.no_such"):
        hooks.around("engine.no_such", lambda original: original())


def test_what_is_left_to_the_start_is_checked_later(
    engine: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    hooks.around("engine.dumps", lambda original, value: original([value]), at_start=True)
    with pytest.raises(UnsupportedEngineError, match=r"did not wrap engine\.dumps"):
        hooks.check()
    HookRegistry.apply_hooks()  # as SGLang does once all plugins are loaded
    hooks.check()
    assert engine.dumps(1) == "[1]"
    hooks.after("engine.no_such", lambda result: result, at_start=True)
    HookRegistry.apply_hooks()
    with pytest.raises(UnsupportedEngineError, match=r"did not wrap engine\.no_such"):
        hooks.check()


def test_a_target_that_another_plugin_has_wrapped() -> None:
    HookRegistry.register("engine.dumps", lambda result, *_: result)
    HookRegistry.apply_hooks()
    with pytest.raises(UnsupportedEngineError, match=r"another plugin has wrapped engine\.dumps"):
        hooks.around("engine.dumps", lambda original, value: original(value))
