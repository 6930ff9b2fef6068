"""``python -m benchmarks.stack`` as a user types it, on tiny sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.stack.__main__ import main
from sglang_indexcache.bench.layer_stack import LayerStackResult
from sglang_indexcache.bench.results import load
from tests.bench.test_latency import CONFIG
from tests.cli.test_bench import folder

STACK_CONFIG = {
    **CONFIG,
    "num_hidden_layers": 4, "num_attention_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 32,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "index_n_heads": 2,
    "index_head_dim": 64, "index_topk": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "intermediate_size": 32,
}  # fmt: skip


def test_layer_stack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = folder(tmp_path, STACK_CONFIG), tmp_path / "out"
    arguments = ["--model", model, "-o", str(out), "--context", "40", "--context", "20"]
    arguments += ["--layers", "2", "--chunk", "16", "--repeats", "1", "--cache-tokens", "80"]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert "prefill 40: indexer" in capsys.readouterr().out
    result = load(LayerStackResult, out / "stack.json")
    assert [(row.phase, row.length, row.requests) for row in result.rows] == [
        ("prefill", 40, 1), ("decode", 40, 1), ("decode", 40, 2),
        ("prefill", 20, 1), ("decode", 20, 1), ("decode", 20, 4),
    ]  # fmt: skip
    table = (out / "stack.md").read_text()
    assert table.index("prefill 20") < table.index("prefill 40")
    assert (out / "stack-share.png").exists()
    assert (out / "stack-scaling.png").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kernels", "fast"], "the kernels are cpu, auto, engine"),
        (["--kv", "int4"], "bf16, got 'int4'"),
        (["--layers", "9"], "4 layers, 9 cannot be run"),
        (["--cache-tokens", "10"], "holds no request of 40"),
        (["--device", "tpu"], "the device is cpu or cuda"),
    ],
)
def test_layer_stack_that_cannot_be_run(tmp_path: Path, options: list[str], message: str) -> None:
    """One line, which Python prints on stderr and ends with exit code 1."""
    model = folder(tmp_path, STACK_CONFIG)
    with pytest.raises(SystemExit, match=message) as ended:
        main(["--model", model, "-o", str(tmp_path / "out"), "--context", "40", *options])
    assert str(ended.value).startswith("error: ")
    assert "\n" not in str(ended.value)
