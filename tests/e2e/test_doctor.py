"""A checkpoint fresh from transformers, made servable by what doctor says, behind API keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sglang_indexcache.errors import ServerError
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.models import BY_NAME
from tests.e2e.conftest import VOCAB, Serve, greedy, prompt
from tests.fixtures.models import make_tokenizer, small_config

KEY, ADMIN_KEY = "the-key", "the-admin-key"


def server(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang_indexcache.cli", "server", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200", **variables},
        check=False,
    )


def doctor(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return server("doctor", *arguments, **variables)


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """Return a folder as ``save_pretrained`` leaves it."""
    family = BY_NAME["glm-5"]
    config = AutoConfig.for_model(family.model_type, **small_config(family, "tiny", VOCAB, {}))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    make_tokenizer(VOCAB).save_pretrained(tmp_path)
    return tmp_path


def test_doctor_makes_a_fresh_checkpoint_start(fresh: Path, serve: Serve) -> None:
    before = doctor("--model-path", str(fresh), "--device", "cpu")
    assert before.returncode == 1, before.stdout + before.stderr
    lines = before.stdout.partition("Add to its config.json: ")[2].partition("; or start")[0]
    path = fresh / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | json.loads(f"{{{lines}}}")))
    after = doctor("--model-path", str(fresh), "--device", "cpu")
    assert "no problem found" in after.stdout, after.stdout + after.stderr

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
        assert "wants an API key" in server("show", "--url", stranger.url).stdout
        states_shown = server("show", "--url", stranger.url, SGLANG_API_KEY=KEY)
    assert states_shown.returncode == 0, states_shown.stdout + states_shown.stderr
    assert KEY not in states_shown.stdout + states_shown.stderr
    assert "in layers 0 and 3, 0 of " in states_shown.stdout
    assert "in layers 1-2 and 4-5: OK" in states_shown.stdout
    assert (
        "index-K: 512 bytes per token; plain DSA: 1,536" in states_shown.stdout
    )  # SGLang takes float16
