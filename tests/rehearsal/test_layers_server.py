"""Beyond a top-k of 2,048, each layer of a server is where transformers' rounding puts it.

The checkpoint is a trained one and reads source code. The server has its first 2,048 tokens in one
chunk, which attends to all of them, and those behind, which have to choose, in another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from sglang_indexcache.pattern import Pattern
from tests.rehearsal.checkpoint import TRAINED
from tests.rehearsal.conftest import Models, Rehearse
from tests.rehearsal.layers import DUMP, SELECTIONS, Layer, Layers, selections, streams
from tests.rehearsal.questions import EAGER, parameters
from tests.rehearsal.widened import LAYERS, TOPK, real_text

pytestmark = pytest.mark.matrix
PATTERN = Pattern("FSSS" * 3)
TOKENS = TOPK + 256
CHOOSING = slice(TOPK, TOKENS)
FLAGS = (
    *("--chunked-prefill-size", str(TOPK), "--max-total-tokens", "3072"),
    *("--indexcache-pattern", str(PATTERN), SELECTIONS),
)


@dataclass(frozen=True)
class Seen:
    """Report of a server on its layers, and the model that knows what they should have done."""

    streams: torch.Tensor
    selections: torch.Tensor
    layers: Layers

    def under(self, pattern: Pattern) -> Iterator[Layer]:
        return self.layers.compare(self.streams, self.selections, pattern, CHOOSING)


@pytest.fixture(scope="module")
def layer_states(
    rehearse: Rehearse, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Seen:
    folder = tmp_path_factory.mktemp("dump")
    ids = real_text(0, TOKENS)
    with rehearse(*EAGER, *FLAGS, DUMP, str(folder), family=TRAINED) as client:
        reply = client.generate(
            input_ids=ids, sampling_params=parameters(None, 1), return_indexer_topk=True
        )
    return Seen(
        streams(folder, ids),
        selections(reply, TOKENS, LAYERS, TOPK),
        Layers(models(TRAINED)),
    )


def test_every_layer_is_as_near_to_float32_as_transformers_own_bfloat16(layer_states: Seen) -> None:
    layers = list(layer_states.under(PATTERN))
    assert len(layers) == LAYERS
    assert all(layer.is_explained for layer in layers), layers


def test_shared_layers_read_what_their_full_layer_selected(layer_states: Seen) -> None:
    of = [PATTERN.source_of(layer) for layer in range(LAYERS)]
    assert torch.equal(layer_states.selections, layer_states.selections[of])


@pytest.mark.parametrize(("wrong", "first"), [("FSSSSSSSFSSS", 4), ("FFSSFSSSFSSS", 1)])
def test_under_another_pattern_the_first_layer_that_differs_is_named(
    layer_states: Seen, wrong: str, first: int
) -> None:
    first_differing = [layer.is_explained for layer in layer_states.under(Pattern(wrong))].index(
        False
    )
    assert first_differing == first
