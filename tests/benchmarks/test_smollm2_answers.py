"""The lean forward answers an evaluation as transformers answers each prompt alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.random_model import make_tokenizer, save_checkpoint
from benchmarks.smollm2.answers import Answers, serving
from benchmarks.smollm2.convert import convert, dsa_config
from sglang_indexcache.errors import ServerError
from sglang_indexcache.hf import share
from sglang_indexcache.lab.client import score as scoring
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.lab.client.score import Prompt
from sglang_indexcache.serving.protocol import check_obeyed
from tests.benchmarks.test_smollm2 import TOPK, logits, random_llama

CONTEXT = tuple(torch.randint(3, 300, (150,), generator=torch.Generator().manual_seed(7)).tolist())
TAILS = ((5, 9, 33, 41), (8, 8, 250), (17, 60, 61, 62, 63, 64, 65, 66))
SCORED = (2, 1, 3)


@pytest.fixture(scope="module")
def model() -> Any:
    llama = random_llama(layers=2)
    torch.manual_seed(8)
    return convert(llama, dsa_config(llama.config, index_heads=6, index_topk=TOPK))


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_checkpoint(model, make_tokenizer(300), "float32", path)
    return path


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Client]:
    with serving(Answers(folder)) as url:
        yield Client(url)


def asked(pattern: str, key: str) -> list[Prompt]:
    pairs = zip(TAILS, SCORED, strict=True)
    return [Prompt(CONTEXT + tail, pattern, key, scored) for tail, scored in pairs]


@pytest.mark.parametrize("pattern", ["FF", "FS"])
def test_questions_are_answered_as_if_each_were_alone(
    client: Client, model: Any, pattern: str
) -> None:
    before = client.states()
    scoring.ask(client, [Prompt(CONTEXT, pattern, pattern), Prompt(CONTEXT, "FS", "beside")])
    prompts = asked(pattern, pattern)
    for prompt, got in zip(prompts, scoring.score(client, prompts, top=20), strict=True):
        with share(model, pattern):
            whole = logits(model, torch.tensor(prompt.ids)).log_softmax(-1)
        expected = whole[-prompt.scored - 1 : -1]
        targets = torch.tensor(prompt.ids[-prompt.scored :])
        taken = expected[torch.arange(prompt.scored), targets]
        torch.testing.assert_close(torch.tensor(got.logprobs), taken, atol=1e-4, rtol=1e-4)
        best = expected.topk(20)
        assert [[token for token, _ in top] for top in got.tops] == best.indices.tolist()
        assert got.computed == len(prompt.ids) - len(CONTEXT)
    check_obeyed(before, client.states(), [pattern], client.name, alone=True)


def test_it_says_in_which_precision_it_answers(client: Client, folder: Path) -> None:
    with serving(Answers(folder, dtype=torch.bfloat16)) as url:
        said = [server.server_info()["dtype"] for server in (client, Client(url))]
    assert said == ["float32", "bfloat16"]


def test_questions_without_their_context_are_refused(client: Client) -> None:
    with pytest.raises(ServerError, match="answers eval alone"):
        scoring.score(client, asked("FF", "never heard"))
    scoring.ask(client, [Prompt(CONTEXT[1:], "FF", "other")])
    with pytest.raises(ServerError, match="does not begin with its key's context"):
        scoring.score(client, asked("FF", "other"))
