"""Interfaces of clients: the OpenAI-compatible API, and the Engine in one's own process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from sglang_indexcache.ask.client import Client
from sglang_indexcache.serving.cpu.platform import MAX_TOTAL_TOKENS
from tests.e2e.conftest import Serve

ROOT = Path(__file__).parents[2]
TEXT = "def mean(values):\n    return sum(values) / len(values)\n" * 8


@pytest.fixture(scope="module")
def client(glm: Path, serve: Serve) -> Iterator[Client]:
    """Everything at its default but the memory, the pattern given by SGLang's own override."""
    override = json.dumps({"index_topk_freq": 3, "index_skip_topk_offset": 1})
    arguments = ["--json-model-override-args", override, "--max-total-tokens", "8192"]
    with serve(glm, *arguments) as client:
        yield client


@pytest.fixture(scope="module")
def openai(client: Client) -> OpenAI:
    return OpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0)


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


def test_chat(openai: OpenAI) -> None:
    reply = openai.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": TEXT}],
        max_tokens=12,
        temperature=0.0,
        logprobs=True,
        extra_body={"ignore_eos": True},
    )
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 12
    assert reply.usage.prompt_tokens > 64
    assert reply.choices[0].message.content


def test_streamed_chat_says_the_same(openai: OpenAI) -> None:
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


def test_completions_of_several_prompts(openai: OpenAI) -> None:
    prompts = ["import os\n", TEXT, "x"]
    together = openai.completions.create(
        model="default", prompt=prompts, max_tokens=4, temperature=0.0
    )
    assert [choice.index for choice in together.choices] == [0, 1, 2]


ENGINE = """
import json, sys
import sglang
from sglang_indexcache.errors import PatternError

def start(pattern):
    return sglang.Engine(
        model_path=sys.argv[1], attention_backend="indexcache", indexcache_pattern=pattern,
        max_total_tokens=4096, dtype="float32", log_level="error",
    )

if __name__ == "__main__":
    try:
        start("FSS")
    except PatternError as error:
        refused = str(error)
    engine = start("FSSFSS")
    state = engine.get_server_info()["internal_states"][0]["indexcache"]
    out = engine.generate(input_ids=list(range(20, 120)),
                          sampling_params={"max_new_tokens": 4, "temperature": 0.0})
    print("RESULT", json.dumps([refused, state["pattern"], state["source"], out["output_ids"]]))
    engine.shutdown()
"""


def test_engine_keyword(tmp_path: Path, glm: Path) -> None:
    """A bad pattern raises to its caller, who may give another one."""
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    command = [sys.executable, str(script), str(glm)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, result.stdout + result.stderr
    refusal, pattern, source, tokens = json.loads(lines[0].removeprefix("RESULT"))
    assert refusal.startswith("Engine(indexcache_pattern=...) FSS")
    assert "3 too short" in refusal
    assert pattern == "FSSFSS"
    assert source == "Engine(indexcache_pattern=...) FSSFSS (given literally)"
    assert len(tokens) == 4
