"""The HTTP process: a request that names its pattern wrongly, or where nobody reads it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from sglang_indexcache.serving import http_checks
from sglang_indexcache.serving.plan import Plan
from tests.serving.plans import plan

LIVE = plan("F" * 8, mode="live")


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan | None]:
    """Return the plan of this process, which a test may replace."""
    plans: list[Plan | None] = [LIVE]
    one_stage = SimpleNamespace(pp_size=1)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: one_stage)
    monkeypatch.setattr(http_checks, "published_plan", lambda: plans[0])
    return plans


def params_with(name: Any) -> dict[str, Any]:
    return {"custom_params": {"indexcache_pattern": name}}


async def route(request: Request) -> Any:
    """Answer as SGLang's route, which reads the body again."""
    return JSONResponse(await request.json())


def post(body: Any, path: str = "/generate", url: str = "") -> httpx.Response:
    app = Starlette(
        routes=[Route(path, route, methods=["POST"])],
        middleware=[Middleware(http_checks.PatternCheck)],
    )

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post(url or path, json=body)

    return asyncio.run(send())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"sampling_params": params_with("uniform:1/4")}),
        ("/generate", {"sampling_params": [params_with("full"), params_with(None), {}]}),
        ("/generate", {"text": "what does indexcache_pattern do?"}),
        ("/invocations", params_with("full")),
        ("/v1/completions", params_with("full")),
        ("/v1/chat/completions", params_with("FSSSFSSS") | {"stream": True}),
        ("/v1/chat/completions", {"messages": [{"indexcache": "said by a user"}]}),
        ("/v1/messages", {"custom_params": {"another's": 1}}),
        ("/v1/chat/completions", {"metadata": {"indexcache_trial": "3"}}),
        (
            "/v1/chat/completions",
            {"metadata": "indexcache_pattern", "tools": [{"name": "indexcache"}]},
        ),
        ("/generate", {"response_format": {"schema": {"indexcache_pattern": {}}}}),
    ],
)
def test_what_is_named_well_or_said_to_others_reaches_the_route(path: str, body: Any) -> None:
    response = post(body, path)
    assert (response.status_code, response.json()) == (200, body)


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/generate", {"sampling_params": params_with("nobody")}, "no pattern is called 'nobody'"),
        (
            "/generate",
            {"sampling_params": [{}, params_with("nobody")]},
            "no pattern is called 'nobody'",
        ),
        ("/v1/completions", params_with(7) | {"stream": True}, "must be a string, got int"),
        ("/generate", {"indexcache_pattern": "full"}, "indexcache_pattern is read by nobody"),
        ("/generate", params_with("full"), "Name the pattern in sampling_params.custom_params"),
        ("/generate", {"sampling_params": {"indexcache_pattern": "full"}}, "read by nobody"),
        ("/generate", {"sampling_params": [{}, {"Index-Cache": "full"}]}, "read by nobody"),
        ("/generate", {"sampling_params": {"custom_params": {"INDEXCACHE_PATTERN": "x"}}}, "read"),
        (
            "/v1/completions",
            {"sampling_params": params_with("full")},
            "in custom_params.indexcache",
        ),
        ("/v1/completions", {"extra_body": params_with("full")}, "in custom_params.indexcache"),
        ("/v1/messages", params_with("full"), "custom_params.indexcache_pattern of /v1/chat/comp"),
        ("/api/generate", {"options": {"indexcache_pattern": "full"}}, "named in the body: in"),
        (
            "/v1/chat/completions",
            {"metadata": {"indexcache_pattern": "full"}},
            "metadata.indexcache_pattern is read by nobody at /v1/chat/completions. Name",
        ),
        (
            "/v1/chat/completions",
            {"chat_template_kwargs": {"IndexCache-Pattern": "full"}},
            "chat_template_kwargs.IndexCache-Pattern is read by nobody",
        ),
        (
            "/v1/chat/completions",
            {"customParams": {"indexcache_pattern": "full"}},
            "customParams.indexcache_pattern is read by nobody",
        ),
        (
            "/v1/chat/completions",
            {"extraBody": params_with("full")},
            "extraBody.custom_params.indexcache_pattern is read by nobody",
        ),
        (
            "/v1/chat/completions",
            {"generation_config": {"indexcache_pattern": "full"}},
            "generation_config.indexcache_pattern is read by nobody",
        ),
        (
            "/predict",
            {"parameters": {"sampling_params": params_with("full")}},
            "nobody at /predict",
        ),
    ],
)
def test_a_name_that_is_none_or_that_nobody_would_read(path: str, body: Any, reason: str) -> None:
    response = post(body, path)
    assert response.status_code == 400
    assert reason in response.json()["error"]["message"]


def test_a_name_in_the_url_is_read_by_nobody() -> None:
    response = post({"text": ""}, url="/generate?Index-Cache-Pattern=1%2F4")
    assert response.status_code == 400
    assert "Index-Cache-Pattern in the URL is read by nobody" in response.text
    assert post({}, url="/generate?note=indexcache").status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"index\\u0063ache_pattern": "full"}',
        b'{"\\u0049ndexcache_pattern": "full"}',
        '{"indexcache_pattern": "full"}'.encode("utf-16"),
    ],
    ids=["a small letter", "a capital", "UTF-16"],
)
def test_a_spelling_that_bytes_do_not_show(body: bytes) -> None:
    assert "_pattern is read by nobody at /v1/messages" in http_checks.wrong_body(
        LIVE, "/v1/messages", body
    )


def test_a_slash_behind_a_route_redirects_as_without_a_name() -> None:
    for body in ({}, {"sampling_params": params_with("full")}):
        response = post(body, url="/generate/")
        assert response.status_code == 307
        assert response.headers["location"] == "http://server/generate"
    assert (
        "no pattern is called" in post({"sampling_params": params_with("x")}, url="/generate/").text
    )


def test_static_mode_takes_its_own_only(plans: list[Plan | None]) -> None:
    plans[0] = plan("FSSSFSSS")
    assert post(params_with("uniform:1/4"), "/v1/completions").status_code == 200
    refusal = post(params_with("full"), "/v1/completions")
    assert refusal.status_code == 400
    assert "static mode" in refusal.text


def test_without_a_plan_nothing_is_checked(plans: list[Plan | None]) -> None:
    plans[0] = None
    assert post({"indexcache_pattern": "nobody"}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{indexcache",
        b"\xff indexcache",
        b'["indexcache"]',
        b'["indexcache",' + b"[" * 100_000,
    ],
    ids=["empty", "no JSON", "no text", "a list", "no end"],
)
def test_what_is_no_json_is_left_to_sglang(body: bytes) -> None:
    assert http_checks.wrong_body(LIVE, "/generate", body) == ""


@pytest.mark.parametrize("is_running", [False, True])
def test_the_middleware_is_inside_sglangs_own(
    monkeypatch: pytest.MonkeyPatch, is_running: bool
) -> None:
    """A tokenizer process makes its manager when its app has begun, the launcher before."""

    class Outer(http_checks.PatternCheck):
        pass

    app = Starlette(middleware=[Middleware(Outer)])
    if is_running:
        app.middleware_stack = app.build_middleware_stack()
    monkeypatch.setitem(http_checks.sys.modules, http_checks._APP, SimpleNamespace(app=app))  # type: ignore[arg-type]
    for _ in range(2):
        http_checks._add_middleware(None, None)
    assert [layer.cls for layer in app.user_middleware] == [Outer, http_checks.PatternCheck]
    stack: Any = app.middleware_stack or app.build_middleware_stack()
    classes = []
    while stack is not None:
        classes.append(type(stack))
        stack = getattr(stack, "_app", None) or getattr(stack, "app", None)
    assert classes.index(Outer) < classes.index(http_checks.PatternCheck)
