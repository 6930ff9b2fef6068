"""Memory of a GPU that is kept free for the graphs of --indexcache-graphs."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_indexcache.serving import plugin
from sglang_indexcache.serving.plan import CONFIG_KEY
from tests.serving.plans import plan

H100 = 81_559
"""MB, as SGLang asks the driver."""


def arguments(*graphs: str, mode: str = "live", fraction: float | None = None) -> Any:
    """Return a server's, which SGLang would give 0.8 of an H100; graphs of up to 512 requests."""
    built_plan = plan("FSFS", mode=mode, graphs=graphs)
    return SimpleNamespace(
        json_model_override_args=json.dumps({CONFIG_KEY: built_plan.hf_overrides()[CONFIG_KEY]}),
        mem_fraction_static=fraction,
        disaggregation_mode="null",
        device="cuda",
        cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(max_bs=512)),
    )


def previous(server_args: Any) -> None:
    server_args.mem_fraction_static = server_args.mem_fraction_static or 0.8


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "resolving_view", lambda server_args: server_args)
    monkeypatch.setattr(
        plugin,
        "declare_resolution",
        lambda server_args, _source, **fields: vars(server_args).update(fields),
    )
    memory = lambda device: H100 if device == "cuda" else None  # noqa: E731
    monkeypatch.setattr("sglang.srt.utils.common.get_device_memory_capacity", memory)


@pytest.mark.parametrize(
    ("graphs", "mode", "megabytes"),
    [((), "static", 0), (("short",), "static", 1024), (("short", "FFFF", "FSFS"), "live", 3072)],
)
def test_each_graph_of_a_size_has_what_sglang_keeps_for_one(
    graphs: tuple[str, ...], mode: str, megabytes: int
) -> None:
    server_args = arguments(*graphs, mode=mode)
    plugin._keep_free_for_graphs(server_args, previous)
    assert server_args.mem_fraction_static == round(0.8 - megabytes / H100, 3)
    assert plan("FSFS", mode=mode, graphs=graphs).graph_reserve_mb(server_args) == megabytes


def test_a_fraction_that_the_user_fixed_stays(caplog: pytest.LogCaptureFixture) -> None:
    server_args = arguments("short", fraction=0.9)
    plugin._keep_free_for_graphs(server_args, previous)
    assert server_args.mem_fraction_static == 0.9
    assert "about 1024 MB" in caplog.text


@pytest.mark.parametrize("fields", [{"disaggregation_mode": "prefill"}, {"device": "cpu"}])
def test_nothing_is_kept_where_no_graph_is_captured(fields: dict[str, Any]) -> None:
    server_args = arguments("short")
    vars(server_args).update(fields)
    plugin._keep_free_for_graphs(server_args, previous)
    assert server_args.mem_fraction_static == 0.8


def test_a_server_that_did_not_ask_for_us_is_left_alone() -> None:
    server_args = arguments("short")
    server_args.json_model_override_args = "{}"
    plugin._keep_free_for_graphs(server_args, previous)
    assert server_args.mem_fraction_static == 0.8
