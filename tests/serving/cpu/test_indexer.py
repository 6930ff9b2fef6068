"""What of the CPU indexer the server tests cannot force to happen."""

from types import SimpleNamespace

import pytest
import torch

from sglang_indexcache.serving.cpu import indexer as indexer_cpu


@pytest.mark.parametrize("rows", [0, 4])
def test_an_idle_rank_touches_nothing(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a rank's idle step is padded depends on its neighbours' timing."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    def no_backend() -> None:
        raise AssertionError("an idle step asked for the backend")

    monkeypatch.setattr(indexer_cpu, "get_attn_backend", no_backend)
    got = indexer_cpu.indexer_forward(
        SimpleNamespace(index_topk=64),
        torch.zeros(rows, 16),
        torch.zeros(rows, 8),
        torch.zeros(rows, dtype=torch.int64),
        SimpleNamespace(forward_mode=ForwardMode.IDLE),
        layer_id=3,
    )
    assert torch.equal(got, torch.full((rows, 64), -1, dtype=torch.int32))
