"""Our backend in SGLang's decode and prefill graphs on the card.

The tests are those of ``tests/serving/cuda``, where a recording stands for the graphs; here tensors
are made on the card, and SGLang captures and replays there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.sglang
STAGES = (("FSSFSS", 0, 6), ("FSSFSS", 1, 6), ("FSSFSS", 3, 6), ("FSSSSS", 1, 6))
"""Patterns and the layers of a pipeline stage, which starts on F or on S."""


@pytest.fixture(autouse=True)
def on_the_card() -> Iterator[None]:
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> Any:
    from tests.serving.cuda import test_capture

    test_capture.replace_attention(monkeypatch)
    return test_capture


@pytest.mark.parametrize(("text", "start", "end"), STAGES)
def test_decode_graph_of_a_stage(decode: Any, text: str, start: int, end: int) -> None:
    decode.replay_stage(decode.Pattern(text), start, end)


@pytest.mark.parametrize("first_overlapped", [1, 2])
def test_decode_graph_of_sub_batches(decode: Any, first_overlapped: int) -> None:
    decode.replay_stage(decode.Pattern("FSSSSF"), 0, 6, first_overlapped)


@pytest.mark.parametrize(("text", "start", "end"), STAGES)
def test_breakable_prefill_graph_of_a_stage(
    decode: Any, monkeypatch: pytest.MonkeyPatch, text: str, start: int, end: int
) -> None:
    decode.replay_prefill(monkeypatch, decode.Pattern(text), start, end)
