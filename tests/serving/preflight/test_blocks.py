"""The resolution of MiniMax-M3's command lines on a GPU node, by SGLang's own pipeline.

One process for all: SGLang takes ten seconds to load, and PyTorch cannot unlearn that it has GPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

ARCHITECTURE = "MiniMaxM3SparseForConditionalGeneration"
SPARSE = [0, 0, 0, *[1] * 57]
BLOCKS = {
    "sparse_attention_freq": SPARSE,
    "sparse_disable_index_value": SPARSE,
    "sparse_index_dim": 128,
    "sparse_num_index_heads": 4,
    "sparse_topk_blocks": 16,
    "sparse_block_size": 128,
    "sparse_init_block": 0,
    "sparse_local_block": 1,
}
TEXT = {
    **{"model_type": "minimax_m2", "num_hidden_layers": 60, "hidden_size": 6144, "head_dim": 128},
    **{"num_attention_heads": 64, "num_key_value_heads": 4, "intermediate_size": 3072},
    **{"num_local_experts": 128, "num_experts_per_tok": 4, "vocab_size": 200064},
    **{"max_position_embeddings": 524288, "rope_theta": 5000000, "hidden_act": "swigluoai"},
}
VISION = {"model_type": "clip_vision_model", "num_hidden_layers": 2, "image_size": 2016}
UNIFORM = "--tp 8 --indexcache-pattern uniform:1/4"
OVERRIDE = "--json-model-override-args"
VALUED = [0, 0, 0, 0, *[1] * 56]

PASS = [
    UNIFORM,
    f"{UNIFORM} --attention-backend indexcache --kv-cache-dtype fp8_e4m3",
    f"{UNIFORM} --dp 8 --enable-dp-attention --enable-mixed-chunk",
    f"{UNIFORM} --disaggregation-mode prefill",
    f"--tp 8 --pp-size 3 --indexcache-pattern {'FSSSS' + 'FSSS' * 13}",  # 17, 20 and 20 of them
]
TRITON = "--prefill-attention-backend triton --decode-attention-backend triton"
CHOSEN = f"{UNIFORM} --attention-backend indexcache {TRITON}"
EAGLE = (
    "--speculative-algorithm EAGLE3 --speculative-draft-model-path x --speculative-num-steps 3 "
    "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
)
REFUSED = {
    f"{UNIFORM} --enable-two-batch-overlap": "where one half would read the other's blocks",
    f"{UNIFORM} {EAGLE}": "does not work with --speculative-algorithm",
    f"{UNIFORM} --indexcache-mode live": f"live mode does not work with a {ARCHITECTURE}",
    f"{UNIFORM} --indexcache-kernels cuda": "does not work with --indexcache-kernels cuda",
    f"{UNIFORM} --indexcache-index-k-dtype float32": "with --indexcache-index-k-dtype",
    f"{UNIFORM} --enable-hisparse": "does not work with --enable-hisparse",
    f"{UNIFORM} --kv-cache-dtype nvfp4": "--kv-cache-dtype nvfp4 is not served",
    f"{UNIFORM} --attention-backend indexcache --decode-attention-backend dsa": (
        "does not work with --decode-attention-backend dsa. Drop it."
    ),
    f"{UNIFORM} --attention-backend fa3": "does not go with --attention-backend fa3",
    "--tp 8 --pp-size 2 --indexcache-pattern uniform:1/4": "stages start at layer 27, where",
    "--tp 8 --indexcache-pattern FSS": "54 too short",
    f"{UNIFORM} --enable-pdmux": "--enable-pdmux does not work with models of sparse attention",
}

CODE = """
import json, os, sys
from sglang_indexcache.serving.preflight import doctor

doctor._choose_device("h200")
from sglang.srt.arg_groups.overrides import attention_backends_of, model_config_of, resolved_view
from sglang_indexcache.serving.plan import Plan

found = []
for arguments, variables in json.load(sys.stdin):
    os.environ.update(variables)
    try:
        server_args, problems = doctor._resolve(arguments, "h200")
        plan, backends = None, ()
        if not problems:
            plan = str(Plan.from_hf_config(model_config_of(server_args).hf_config).pattern)
            backends = attention_backends_of(resolved_view(server_args))
        found.append(([str(problem) for problem in problems], plan, backends))
    except Exception as error:
        found.append(([str(error)], None, ()))
    for name in variables:
        del os.environ[name]
print(json.dumps(found))
"""

DENSE = "SGLANG_OPT_USE_MINIMAX_DENSE_SPARSE_DECODE"
AMD = "SGLANG_MINIMAX_M3_INDEX_TOPK_FREQ"
VARIABLES = {f"{DENSE}=1": {DENSE: "1"}, f"{AMD}=4": {AMD: "4"}}
CONFIGS = {
    "values": {**BLOCKS, "sparse_disable_index_value": VALUED},
    "unpublished": None,
}


def write(folder: Path, blocks: dict[str, Any] | None) -> Path:
    text = TEXT | ({} if blocks is None else {"sparse_attention_config": blocks})
    if blocks is None:  # as transformers would write it
        kinds = ["minimax_m3_sparse" if on else "full_attention" for on in SPARSE]
        text |= {"layer_types": kinds, "index_topk_blocks": 16, "index_block_size": 128}
    config = {"architectures": [ARCHITECTURE], "model_type": "minimax_m3_vl", "dtype": "bfloat16"}
    config |= {"text_config": text, "vision_config": VISION}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def resolved(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[list[str], Any, list[str]]]:
    """Resolve every command line on a node with H200s: problems, pattern, backends."""
    folder = write(tmp_path_factory.mktemp("m3"), BLOCKS)
    lines = {line: (folder, line, {}) for line in (*PASS, CHOSEN, *REFUSED)}
    lines |= {name: (folder, UNIFORM, variables) for name, variables in VARIABLES.items()}
    for name, blocks in CONFIGS.items():
        lines[name] = (write(tmp_path_factory.mktemp(name), blocks), UNIFORM, {})
    lines_asked = [
        (["--model-path", str(at), *line.split()], env) for at, line, env in lines.values()
    ]
    process = subprocess.run(
        [sys.executable, "-c", CODE],
        input=json.dumps(lines_asked),
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return dict(zip(lines, json.loads(process.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("line", PASS)
def test_the_plan_reaches_the_models_config_and_sglang_chooses_the_dense_backend(
    resolved: dict[str, Any], line: str
) -> None:
    problems, pattern, backends = resolved[line]
    assert problems == []
    assert pattern.startswith("FSSS")
    assert len(pattern) == 57
    assert backends == ["fa3", "fa3"]


def test_a_user_may_choose_the_dense_backend(resolved: dict[str, Any]) -> None:
    problems, pattern, backends = resolved[CHOSEN]
    assert (problems, len(pattern), backends) == ([], 57, ["triton", "triton"])


@pytest.mark.parametrize("line", REFUSED)
def test_what_was_not_examined_or_would_not_share_is_refused(
    resolved: dict[str, Any], line: str
) -> None:
    problems, *_ = resolved[line]
    assert any(REFUSED[line] in problem for problem in problems), problems


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_by_which_nothing_would_be_shared_is_refused(
    resolved: dict[str, Any], name: str
) -> None:
    problems, *_ = resolved[name]
    assert any(f"does not work with {name.partition('=')[0]}, w" in problem for problem in problems)


def test_indexers_with_an_output_of_their_own_are_refused(resolved: dict[str, Any]) -> None:
    problems, *_ = resolved["values"]
    assert any("is not set in layers 3), which an S layer would" in problem for problem in problems)


def test_a_config_that_sglang_does_not_read_is_refused(resolved: dict[str, Any]) -> None:
    problems, *_ = resolved["unpublished"]
    assert any("from sparse_attention_config alone" in problem for problem in problems)
