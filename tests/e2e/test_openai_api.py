"""Interfaces of clients: the OpenAI-compatible API, and the Engine in one's own process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.serving.cpu.platform import MAX_TOTAL_TOKENS
from tests.e2e.conftest import Serve
from tests.preloaded import Template

ROOT = Path(__file__).parents[2]
TEXT = "def mean(values):\n    return sum(values) / len(values)\n" * 8


@pytest.fixture(scope="module")
def client(glm: Path, serve: Serve) -> Iterator[Client]:
    """Everything at its default but the memory, the pattern given by SGLang's own override."""
    override = json.dumps({"index_topk_freq": 3, "index_skip_topk_offset": 1})
    arguments = ["--json-model-override-args", override, "--max-total-tokens", "8192"]
    with serve(glm, *arguments) as client:
        yield client


def test_upstream_override_really_skips(client: Client) -> None:
    [state] = client.states()
    assert state.pattern == "FSSFSS"
    assert "index_topk_freq" in state.source


def test_the_platforms_defaults_are_those_of_the_page(client: Client) -> None:
    page = " ".join((ROOT / "docs/serving.md").read_text().split())
    info = client.server_info()
    running, chunk = info["max_running_requests"], info["chunked_prefill_size"]
    assert f"with a KV pool of {MAX_TOTAL_TOKENS:,} tokens, {running} running requests" in page
    assert f"prefill chunks of {chunk:,} tokens" in page


def test_streamed_chat_says_the_same(client: Client) -> None:
    openai = OpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0)
    request = {
        "model": "default",
        "messages": [{"role": "user", "content": TEXT}],
        "max_tokens": 12,
        "temperature": 0.0,
        "extra_body": {"ignore_eos": True},
    }
    reply = openai.chat.completions.create(**request).choices[0].message.content
    chunks = list(openai.chat.completions.create(**request, stream=True))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert sum(map(bool, pieces)) > 1
    assert "".join(pieces) == reply


def test_engine_keyword(tmp_path: Path, glm: Path) -> None:
    """A bad pattern raises to its caller, who may give another one."""
    log = tmp_path / "engine.log"
    Template.of(os.environ).fork(["tests.e2e.engine_in_process", str(glm)], log).wait(300)
    lines = [line for line in log.read_text().splitlines() if line.startswith("RESULT")]
    assert lines, log.read_text()
    refusal, pattern, source, tokens = json.loads(lines[0].removeprefix("RESULT"))
    assert refusal.startswith("Engine(indexcache_pattern=...) FSS")
    assert "3 too short" in refusal
    assert pattern == "FSSFSS"
    assert source == "Engine(indexcache_pattern=...) FSSFSS (given literally)"
    assert len(tokens) == 4
