"""A checkpoint fresh from transformers, made servable by what doctor says, behind API keys."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sglang_indexcache.errors import ServerError
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.models import BY_NAME
from tests.e2e.conftest import VOCAB, Serve, greedy, prompt
from tests.fixtures.models import make_tokenizer, small_config
from tests.preloaded import Template

KEY, ADMIN_KEY = "the-key", "the-admin-key"


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``run("doctor", "--flag", ...)``: a ``server`` command in a fork, and what it printed."""
    log = tmp_path_factory.mktemp("commands") / "log"

    def run(*arguments: str, **variables: str) -> tuple[int, str]:
        command = ["sglang_indexcache.cli", "server", *arguments]
        template = Template.of(os.environ)
        forked = template.fork(command, log, environment={"COLUMNS": "200", **variables})
        return forked.wait(120), log.read_text()

    return run


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """Return a folder as ``save_pretrained`` leaves it."""
    family = BY_NAME["glm-5"]
    config = AutoConfig.for_model(family.model_type, **small_config(family, "tiny", VOCAB, {}))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    make_tokenizer(VOCAB).save_pretrained(tmp_path)
    return tmp_path


def test_doctor_makes_a_fresh_checkpoint_start(fresh: Path, serve: Serve, run: Run) -> None:
    doctor = ("doctor", "--model-path", str(fresh), "--device", "cpu")
    code, output = run(*doctor)
    assert code == 1, output
    lines = output.partition("Add to its config.json: ")[2].partition("; or start")[0]
    path = fresh / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | json.loads(f"{{{lines}}}")))
    code, output = run(*doctor)
    assert code == 0, output
    assert "no problem found" in output, output

    keys = ("--api-key", KEY, "--admin-api-key", ADMIN_KEY)
    with serve(fresh, "--indexcache-pattern", "FSSFSS", *keys) as stranger:
        with pytest.raises(ServerError, match="wants an API key"):
            greedy(stranger, prompt(100, 0), 2)
        user = Client(stranger.url, api_key=KEY)
        assert len(greedy(user, prompt(100, 0), 2)) == 2
        with pytest.raises(ServerError, match=r"does not accept.*SGLANG_ADMIN_API_KEY"):
            user.flush_cache()
        admin = Client(stranger.url, api_key=KEY, admin_api_key=ADMIN_KEY)
        admin.flush_cache()
        assert "wants an API key" in run("show", "--url", stranger.url)[1]
        code, output = run("show", "--url", stranger.url, SGLANG_API_KEY=KEY)
    assert code == 0, output
    assert KEY not in output
    assert "in layers 0 and 3, 0 of " in output
    assert "in layers 1-2 and 4-5: OK" in output
    assert "index-K: 512 bytes per token; plain DSA: 1,536" in output  # SGLang takes float16
