from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sglang_indexcache.errors import TrainingError
from sglang_indexcache.heal.data.batches import IGNORED, Mixture
from sglang_indexcache.heal.data.retrieval import TaskWords
from sglang_indexcache.heal.data.text import Text, unigram_loss
from sglang_indexcache.support.text import machine_text
from tests.heal.tokenizers import tokenizer

LENGTH = 96


@pytest.fixture(scope="module")
def text() -> Text:
    return Text.of_machine(tokenizer(), 500_000)


def mixture(text: Text, seed: int = 0, **weights: float) -> Mixture:
    chosen = weights or {"text": 1.0, "recall": 1.0, "needles": 1.0, "tracking": 1.0}
    return Mixture(tokenizer(), text, TaskWords(tokenizer()), chosen, [32, 48], seed)


def test_a_row_depends_on_seed_step_and_number_only(text: Text, seed: int) -> None:
    whole = mixture(text, seed).batch(3, range(6), LENGTH)
    part = mixture(text, seed).batch(3, [1, 4], LENGTH)
    for name, tensor in vars(whole).items():
        assert torch.equal(tensor[[1, 4]], getattr(part, name))
    assert not torch.equal(whole.ids, mixture(text, seed).batch(4, range(6), LENGTH).ids)
    assert not torch.equal(whole.ids, mixture(text, seed + 1).batch(3, range(6), LENGTH).ids)


def test_documents_are_packed_and_padded(text: Text) -> None:
    batch = mixture(text, recall=1.0).batch(0, range(20), 100)
    for row in range(20):
        documents, positions = batch.documents[row], batch.positions[row]
        for number in range(int(documents.max()) + 1):
            own = positions[documents == number]
            assert own.tolist() == list(range(len(own)))
        padding = documents == -1
        assert (batch.ids[row][padding] == tokenizer().pad_token_id).all()
        assert (batch.labels[row][padding] == IGNORED).all()
    assert (batch.documents == -1).any()
    assert (batch.documents == 2).any()


def test_labels_are_the_tokens_and_answers_are_labelled(text: Text) -> None:
    batch = mixture(text).batch(0, range(16), LENGTH)
    labelled = batch.labels != IGNORED
    assert torch.equal(batch.labels[labelled], batch.ids[labelled])
    assert (labelled | ~batch.answers).all()


def test_held_out_files_are_not_trained_on(text: Text) -> None:
    files = list(machine_text(500_000))
    joined = tokenizer().decode(text.held_out[:200])
    assert joined[:300] in files[9]
    assert len(text.held_out) < len(text.train)


def test_unigram_loss_of_equal_frequencies_is_the_entropy() -> None:
    tokens = np.repeat(np.arange(8, dtype=np.int32), 1000)
    assert unigram_loss(tokens, tokens, 8) == pytest.approx(math.log(8))


def test_bad_mixtures_are_clear_errors(text: Text) -> None:
    with pytest.raises(TrainingError, match="names haystack"):
        mixture(text, haystack=1.0)
    with pytest.raises(TrainingError, match="fits a row of 20"):
        mixture(text, recall=1.0).batch(0, [0], 20)
    with pytest.raises(TrainingError, match="at least"):
        Text.of_machine(tokenizer(), 1000)
