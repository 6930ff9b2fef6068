"""The HTTP process: names in bodies and headers, the limit, and what an answer's header says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from sglang_indexcache.serving import front
from sglang_indexcache.serving.settings import Plan
from tests.serving.plans import plan

LEGAL = [f"F{n:07b}".replace("0", "S").replace("1", "F") for n in range(64)]
DEFAULT = "FSFSFSFS"
SERVING = SimpleNamespace(tokenizer_worker_num=1)


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> list[Plan | None]:
    """The plan of this process, which a test may replace."""
    plans: list[Plan | None] = [plan("F" * 8, mode="live")]
    one_stage = SimpleNamespace(pp_size=1)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: one_stage)
    monkeypatch.setattr("sglang.srt.runtime_context.get_serving", lambda: SERVING)
    monkeypatch.setattr(front, "published_plan", lambda: plans[0])
    monkeypatch.setattr(front, "_in_flight", front._in_flight.__class__())
    return plans


def named(name: Any) -> dict[str, Any]:
    return {"custom_params": {"indexcache_pattern": name}}


def under(sampling: Any) -> str:
    """What the scheduler serves: the name, or its default."""
    name = ((sampling or {}).get("custom_params") or {}).get("indexcache_pattern") or DEFAULT
    return {"full": "F" * 8, "uniform:1/4": "FSSSFSSS"}.get(name, name)


async def scheduler(_manager: Any, incoming: Any, _request: Any = None) -> AsyncIterator[Any]:
    """In place of ``TokenizerManager.generate_request``: two steps for each prompt."""
    several = isinstance(incoming.text, list)
    texts = incoming.text if several else [incoming.text]
    given = incoming.sampling_params
    each = given if isinstance(given, list) else [given] * len(texts)
    told = [{"meta_info": {"indexcache_pattern": [under(one)]}, "text": t}
            for one, t in zip(each, texts, strict=True)]  # fmt: skip
    if incoming.stream:
        for _ in range(2):
            for one in told:
                yield one
    else:
        yield told if several else told[0]


def generate(incoming: Any) -> Any:
    return front._generate(scheduler, None, incoming, None)


async def route(request: Request) -> Any:
    """As SGLang's: a stream begins before it knows whether the request is good."""
    body = await request.json()
    incoming = SimpleNamespace(
        text=body.get("text", "x"),
        sampling_params=body.get("sampling_params"),
        stream=body.get("stream", False),
    )
    if incoming.stream:

        async def stream() -> AsyncIterator[str]:
            if body.get("early"):
                yield "data: created\n\n"
            try:
                async for answer in generate(incoming):
                    yield f"data: {json.dumps(answer)}\n\n"
            except ValueError as error:
                yield f"data: {error}\n\n"

        return StreamingResponse(stream())
    try:
        return JSONResponse(await anext(generate(incoming)))
    except ValueError as error:
        return JSONResponse({"error": str(error)}, status_code=400)


def post(
    body: Any, path: str = "/generate", *said: tuple[str, str], **headers: str
) -> httpx.Response:
    app = Starlette(
        routes=[Route(path, route, methods=["POST"])], middleware=[Middleware(front.Front)]
    )

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await client.post(path, content=content, headers=[*said, *headers.items()])

    return asyncio.run(send())


def told(response: httpx.Response) -> str | None:
    assert response.status_code == 200, response.text
    return response.headers.get(front.HEADER)


NAME = {"X-IndexCache-Pattern": "uniform:1/4"}


# -- what an answer says -----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_an_answer_tells_its_pattern(stream: bool, early: bool) -> None:
    body = {"stream": stream, "early": early}
    assert told(post(body)) == DEFAULT
    assert told(post(body | {"sampling_params": named("uniform:1/4")})) == "FSSSFSSS"
    assert told(post(body, **NAME)) == "FSSSFSSS"
    assert post(body, **NAME).text.count("FSSSFSSS") == (2 if stream else 1)
    assert told(post(body, path="/v1/messages", **NAME)) == "FSSSFSSS"


def test_static_mode_tells_its_own(served: list[Plan | None]) -> None:
    served[0] = plan("FSSSFSSS")
    assert told(post({"stream": True})) == "FSSSFSSS"
    assert told(post({}, **NAME)) == "FSSSFSSS"
    assert post({}, **{"X-IndexCache-Pattern": "full"}).status_code == 400


def test_a_batch_tells_all_of_its_patterns_where_they_are_known_in_time() -> None:
    body: dict[str, Any] = {"text": ["a", "b"]}
    mixed = body | {"sampling_params": [named("full"), {}]}
    assert told(post(mixed)) == f"FFFFFFFF, {DEFAULT}"
    assert told(post(mixed | {"stream": True})) is None  # it begins before the second is known
    both = body | {"sampling_params": [named("full"), named("uniform:1/4")]}
    assert told(post(both | {"stream": True})) == "FFFFFFFF, FSSSFSSS"


def test_without_a_plan_nothing_is_said_or_checked(served: list[Plan | None]) -> None:
    served[0] = None
    assert told(post({"sampling_params": named("nobody")})) == "nobody"  # the scheduler's own word


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_name_is_the_clients_error(stream: bool) -> None:
    for response in (
        post({"stream": stream, "sampling_params": named("nobody")}),
        post({"stream": stream}, **{"X-IndexCache-Pattern": "nobody"}),
    ):
        assert response.status_code == 400
        assert "no pattern is called 'nobody'" in response.text
        assert front.HEADER not in response.headers


def test_a_header_that_comes_twice_is_no_choice() -> None:
    """A server that took the last would hide the other."""
    twice = [(front.HEADER, "full"), (front.HEADER, "uniform:1/4")]
    response = post({}, "/generate", *twice)
    assert response.status_code == 400
    assert "'full, uniform:1/4'" in response.text


def test_header_and_body_may_agree_and_must() -> None:
    assert told(post({"sampling_params": named("FSSSFSSS")}, **NAME)) == "FSSSFSSS"
    other = post({"sampling_params": named("full")}, **NAME)
    assert other.status_code == 400
    assert "names uniform:1/4 and the body full. Give only one" in other.text


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/generate", {"indexcache_pattern": "full"}, "indexcache_pattern is read by nobody"),
        ("/generate", named("full"), "Name the pattern in sampling_params.custom_params"),
        ("/generate", {"sampling_params": {"indexcache_pattern": "full"}}, "read by nobody"),
        ("/generate", {"sampling_params": [{}, {"Index-Cache": "full"}]}, "read by nobody"),
        ("/generate", {"sampling_params": {"custom_params": {"INDEXCACHE_PATTERN": "x"}}}, "read"),
        ("/v1/completions", {"sampling_params": named("full")}, "in custom_params.indexcache"),
        ("/v1/completions", {"extra_body": named("full")}, "in custom_params.indexcache"),
        ("/v1/messages", named("full"), "Name the pattern in the header X-IndexCache-Pattern"),
        ("/api/generate", {"options": {"indexcache_pattern": "full"}}, "in the header"),
    ],
)
def test_a_name_that_nobody_would_read(path: str, body: Any, reason: str) -> None:
    response = post(body, path)
    assert response.status_code == 400
    assert reason in response.json()["error"]["message"]


@pytest.mark.parametrize("header", ["X-Indexcache-Patern", "IndexCache-Pattern", "x-index-cache"])
def test_a_misspelt_header(header: str) -> None:
    response = post({}, **{header: "full"})
    assert response.status_code == 400
    assert "named in X-IndexCache-Pattern" in response.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", named("full")),
        ("/generate", {"text": "what does indexcache_pattern do?"}),
        ("/v1/chat/completions", {"messages": [{"indexcache": "said by a user"}]}),
        ("/v1/messages", {"custom_params": {"another's": 1}}),
    ],
)
def test_what_is_said_in_the_right_place_or_not_to_us(path: str, body: Any) -> None:
    assert front.misplaced(path, json.dumps(body).encode()) == ""


def test_vertex_ai_chooses_its_route(monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps({"parameters": {"sampling_params": named("full")}}).encode()
    assert front.misplaced("/vertex_generate", body) == ""
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/predict")
    assert front.misplaced("/predict", body) == ""
    assert "read by nobody at /vertex_generate" in front.misplaced("/vertex_generate", body)


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
    assert front.misplaced("/generate", body) == ""


# -- how many ----------------------------------------------------------------------------------


def incoming(*names: Any, stream: bool = True) -> Any:
    sampling = [named(name) for name in names]
    return SimpleNamespace(text=["x"] * len(names), sampling_params=sampling, stream=stream)


async def begin(*names: Any) -> Any:
    """A stream that is under way."""
    begun = generate(incoming(*names))
    await anext(begun)
    return begun


def test_so_many_patterns_at_once() -> None:
    async def check() -> None:
        most = front.MOST_AT_ONCE
        held = [await begin(name) for name in LEGAL[: most - 1]]
        held.append(await begin("full"))
        for name in (LEGAL[0], "full", "F" * 8):  # patterns count, not their spellings
            await (await begin(name)).aclose()
        with pytest.raises(ValueError, match="name 32 other patterns already") as refused:
            await begin(LEGAL[40])
        assert refused.value.status_code == 429  # type: ignore[attr-defined]
        await held.pop().aclose()
        await (await begin(LEGAL[40])).aclose()
        for each in held:
            await each.aclose()
        assert not front._in_flight

    asyncio.run(check())


def test_a_whole_answer_gives_its_names_back() -> None:
    """SGLang's routes take the one answer and never close what it came from."""

    async def check() -> None:
        held = [generate(incoming(*LEGAL[n : n + 32], stream=False)) for n in (0, 8)]
        for begun in held:
            assert len(await anext(begun)) == 32
            assert not front._in_flight

    asyncio.run(check())


@pytest.mark.parametrize("stream", [False, True])
def test_one_too_many_is_told_to_try_again(stream: bool) -> None:
    front._in_flight.update(front.resolve(plan("F" * 8, mode="live"), name) for name in LEGAL[:32])
    response = post({"stream": stream, "sampling_params": named(LEGAL[40])})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert "Try again" in response.text
    assert told(post({"sampling_params": named(LEGAL[3])})) == LEGAL[3]
    assert told(post({})) == DEFAULT


def test_tokenizer_processes_share_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SERVING, "tokenizer_worker_num", 3)
    front._in_flight.update(front.resolve(plan("F" * 8, mode="live"), name) for name in LEGAL[:10])
    assert told(post({"sampling_params": named(LEGAL[3])})) == LEGAL[3]
    response = post({"sampling_params": named(LEGAL[40])})
    assert response.status_code == 429
    assert "each of this server's 3 tokenizer processes takes 10 at once" in response.text


def test_a_batch_of_too_many_is_told_to_be_split() -> None:
    body = {"text": ["x"] * 40, "sampling_params": [named(name) for name in LEGAL[:40]]}
    response = post(body)
    assert response.status_code == 400
    assert "one request names 40 different patterns, and a server takes 32" in response.text
    most = {"text": ["x"] * 40, "sampling_params": [named(name) for name in LEGAL[:32]] * 2}
    most["text"] = ["x"] * 64
    assert post(most).status_code == 200


def test_an_error_of_sglangs_frees_the_place() -> None:
    async def fails(*_: Any) -> AsyncIterator[Any]:
        raise ValueError("too long")
        yield

    async def check() -> None:
        with pytest.raises(ValueError, match="too long"):
            await anext(front._generate(fails, None, incoming("full")))

    asyncio.run(check())
    assert not front._in_flight


# -- every process that takes requests ---------------------------------------------------------


@pytest.mark.parametrize("is_running", [False, True])
def test_the_middleware_is_inside_sglangs_own(
    monkeypatch: pytest.MonkeyPatch, is_running: bool
) -> None:
    """A tokenizer process makes its manager when its app has begun, the launcher before."""

    class Outer(front.Front):
        pass

    app = Starlette(middleware=[Middleware(Outer)])
    if is_running:
        app.middleware_stack = app.build_middleware_stack()
    monkeypatch.setitem(front.sys.modules, front._APP, SimpleNamespace(app=app))  # type: ignore[arg-type]
    for _ in range(2):
        front._add_middleware(None, None)
    assert [each.cls for each in app.user_middleware] == [Outer, front.Front]
    stack: Any = app.middleware_stack or app.build_middleware_stack()
    found = []
    while stack is not None:
        found.append(type(stack))
        stack = getattr(stack, "_app", None) or getattr(stack, "app", None)
    assert found.index(Outer) < found.index(front.Front)
