"""Stage 0: a dense MLA checkpoint becomes DSA without changing what it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from sglang_indexcache.errors import CheckpointError, TrainingError
from sglang_indexcache.heal.checkpoints import load
from sglang_indexcache.heal.convert import convert
from sglang_indexcache.heal.model import is_indexer
from tests.heal.models import FIELDS
from tests.heal.tokenizers import tokenizer


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return save_dense(tmp_path / "dense")


def save_dense(folder: Path, **changes: Any) -> Path:
    fields = {k: v for k, v in FIELDS.items() if not k.startswith("index_")}
    # The first of the layers is dense, the rest are expert layers, as in real models.
    config = DeepseekV3Config(
        **{**fields, "vocab_size": 700, "first_k_dense_replace": 1, **changes}
    )
    DeepseekV3ForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("to", [None, "glm_moe_dsa"])
def test_the_converted_model_computes_the_same_while_everything_is_selected(
    dense: Path, tmp_path: Path, to: str | None
) -> None:
    convert(dense, tmp_path / "dsa", index_topk=32, index_n_heads=2, index_head_dim=16, to=to)
    before = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    after, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "dsa", dtype=torch.float32, output_loading_info=True
    )
    assert after.config.model_type == (to or "deepseek_v32")
    assert not report["missing_keys"]
    ids = torch.randint(0, 700, (2, 32))
    with torch.no_grad():
        torch.testing.assert_close(after(ids).logits, before(ids).logits, rtol=1e-4, atol=1e-4)
    assert sum(is_indexer(name) for name, _ in after.named_parameters()) == 4 * 5
    assert load(tmp_path / "dsa")[1].get_vocab() == tokenizer().get_vocab()


def test_the_seed_decides_the_indexers(dense: Path, tmp_path: Path) -> None:
    def indexers(seed: int, name: str) -> list[torch.Tensor]:
        model = convert(dense, tmp_path / name, 8, 2, 16, seed=seed)
        return [p for n, p in model.named_parameters() if n.endswith("indexer.wk.weight")]

    first, again, other = indexers(0, "a"), indexers(0, "b"), indexers(1, "c")
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(first, other, strict=True))


def test_what_cannot_be_converted_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        convert(tmp_path, tmp_path / "out")
    full_rank = save_dense(tmp_path / "full-rank", q_lora_rank=None)
    with pytest.raises(TrainingError, match="no q_lora_rank"):
        convert(full_rank, tmp_path / "out")
    halves = save_dense(tmp_path / "halves", rope_interleave=False)
    with pytest.raises(TrainingError, match="rope_interleave"):
        convert(halves, tmp_path / "out")
    dense = save_dense(tmp_path / "dense")
    with pytest.raises(TrainingError, match="cannot convert to 'llama'"):
        convert(dense, tmp_path / "out", to="llama")
    convert(dense, tmp_path / "dsa", 8, 2, 16)
    with pytest.raises(TrainingError, match="is a deepseek_v32"):
        convert(tmp_path / "dsa", tmp_path / "out")
