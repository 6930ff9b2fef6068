"""``server doctor`` on a machine without a GPU, for the command lines of a node that has them.

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
from transformers import AutoConfig

from sglang_indexcache.models import BY_NAME

pytest.importorskip("sglang")

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
PUBLISHED = {
    "dtype": "bfloat16",
    "num_nextn_predict_layers": 1,
    "quantization_config": {**FP8, "weight_block_size": [128, 128]},
}
CONTEXTS = {"glm-5": 202752, "deepseek-v3.2": 163840}

EAGLE = (
    "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4"
)
NGRAM = "--speculative-algorithm NGRAM --speculative-ngram-max-bfs-breadth 1"
DP = "--dp 8 --enable-dp-attention"
UNIFORM = "--indexcache-pattern uniform:1/4"

PASS = {
    "glm-5": [
        "--tp 8 --indexcache-pattern 1/4",
        f"--tp 8 --indexcache-pattern 1/4 {EAGLE} --kv-cache-dtype fp8_e4m3",
        f"--tp 8 --indexcache-pattern 1/2 {DP} {EAGLE}",
        f"--tp 8 --indexcache-pattern 1/4 {DP} --moe-a2a-backend deepep --deepep-mode auto",
        "--tp 8 --indexcache-pattern 1/4 --enable-hierarchical-cache",
        f"--tp 8 --indexcache-pattern 1/4 {NGRAM}",
        "--tp 8 --indexcache-mode live --indexcache-pattern full",
    ],
    "deepseek-v3.2": [
        f"--tp 8 {UNIFORM} {DP} {EAGLE}",
        f"--tp 8 {UNIFORM} {DP} {EAGLE} --moe-a2a-backend deepep --kv-cache-dtype fp8_e4m3",
        f"--tp 8 {UNIFORM} --disaggregation-mode prefill",
        f"--tp 8 {UNIFORM} {DP} --moe-a2a-backend deepep --enable-two-batch-overlap",
    ],
}
STOCK = {  # lines that do not ask for IndexCache, with what stands in the place of our backend
    "--tp 8": "added",
    "--tp 8 --attention-backend dsa": "in the place of dsa",
    "--tp 8 --attention-backend=nsa": "in the place of nsa",
    "--tp 8 --attention-backend flashinfer": "in the place of flashinfer",
    "--tp 8 --decode-attention-backend flashinfer": "in the place of flashinfer",
    "--tp 8 --prefill-attention-backend dsa --decode-attention-backend flashmla": (
        "in the place of dsa and flashmla"
    ),
    f"--tp 8 {EAGLE} --speculative-draft-attention-backend flashinfer": "added",
    "--tp 8 --mm-attention-backend fa3": "added",
    '--tp 8 --json-model-override-args {"index_topk_freq":4}': "added",
    "--config {folder}/stock.yaml": "in the place of dsa",
}
ASKED = ["--config {folder}/asked.yaml", "--tp 8 --attention-backend=indexcache"]

REFUSED = [  # with every reason, each of which holds on a node with GPUs
    (
        f"--tp 8 --indexcache-mode live {EAGLE} --use-ray --pp-size 4 --indexcache-pattern 1/4 "
        '--enable-flexkv --json-model-override-args {"index_topk":512}',
        [
            "does not work with --use-ray",
            "live mode does not work with --speculative-algorithm",
            "FlexKV finds KV by its tokens alone",
            "stage",
            "--dsa-topk-backend torch",
        ],
    ),
    ("--tp 8 --indexcache-pattern 1/4 --no-such-flag", ["unrecognized arguments: --no-such-flag"]),
    (
        f"--tp 8 --indexcache-pattern 1/4 --use-ray --kv-cache-dtype fp8_e4m3 {EAGLE} --dp 3 "
        "--enable-dp-attention",
        ["does not work with --use-ray", "SGLang refuses"],
    ),
    ("--tp 8 --json-model-override-args {index", ["--json-model-override-args is not JSON"]),
    (
        f"--tp 8 --indexcache-pattern 1/8 --indexcache-mode live {EAGLE}",
        ["no pattern at retention 1/8", "live mode does not work with --speculative-algorithm"],
    ),
    (
        "--tp 8 --indexcache-pattern 1/4 --dsa-decode-backend trtllm",
        ["--dsa-decode-backend trtllm needs a Blackwell GPU, and this is NVIDIA H200"],
    ),
    (
        '--tp 8 --dtype float16 --json-model-override-args {"index_head_dim":192}',
        ["index_head_dim is 192 and must be 128", "Add --dtype bfloat16"],
    ),
    (
        '--tp 4 --json-model-override-args {"index_head_dim":192}',
        ["index_head_dim is 192 and must be 128", "takes 187 GB of each of 4 GPUs"],
    ),
]

CODE = """
import io, json, sys
from rich.console import Console
from sglang_indexcache.serving.operating.doctor import examine

examined = []
for arguments in json.load(sys.stdin):
    said = io.StringIO()
    found = examine(arguments)
    found.tell(Console(file=said, width=300))
    examined.append((not found.problems, said.getvalue()))
print(json.dumps(examined))
"""


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[bool, str]]:
    """Run the doctor; return its answers by family and command line."""
    commands = [(name, line) for name, lines in PASS.items() for line in lines]
    commands += [("glm-5", line) for line in (*STOCK, *ASKED, *(line for line, _ in REFUSED))]
    folders = {name: config_only(name, tmp_path_factory.mktemp(name)) for name in PASS}
    (folders["glm-5"] / "stock.yaml").write_text("tp-size: 8\nattention-backend: dsa\n")
    (folders["glm-5"] / "asked.yaml").write_text("tp-size: 8\nattention-backend: indexcache\n")
    arguments = [
        ["--model-path", str(folders[name]), *line.replace("{folder}", str(folders[name])).split()]
        for name, line in commands
    ]
    process = subprocess.run(
        [sys.executable, "-c", CODE],
        input=json.dumps(arguments),
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    answers = json.loads(process.stdout.splitlines()[-1])
    return {
        f"{name} {line}": answer for (name, line), answer in zip(commands, answers, strict=True)
    }


def config_only(name: str, folder: Path) -> Path:
    """A folder with the config of a published model; transformers' defaults are its shape."""
    family = BY_NAME[name]
    config: dict[str, Any] = AutoConfig.for_model(family.model_type).to_dict()
    config |= {**family.extra_config, **PUBLISHED, "architectures": [family.architecture]}
    config["max_position_embeddings"] = CONTEXTS[name]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "command", [f"{name} {line}" for name, lines in PASS.items() for line in lines]
)
def test_usual_command_lines_of_a_gpu_node_pass(
    examined: dict[str, tuple[bool, str]], command: str
) -> None:
    fine, text = examined[command]
    assert fine, text
    first, second, *_ = text.splitlines()
    assert first.startswith("checked for")
    assert "NVIDIA H200" in first
    assert second == "no problem found"
    if "live" not in command:
        shared = {"1/4": 56, "1/2": 38} if command.startswith("glm-5") else {"uniform:1/4": 45}
        bytes_saved = 132 * shared[command.partition("--indexcache-pattern ")[2].split()[0]]
        assert (
            f"{bytes_saved} of {132 * (78 if 'glm-5' in command else 61)} bytes per token" in text
        )


@pytest.mark.parametrize("line", STOCK)
def test_a_line_that_does_not_ask_for_indexcache_is_told_so_and_looked_at(
    examined: dict[str, tuple[bool, str]], line: str
) -> None:
    fine, text = examined[f"glm-5 {line}"]
    assert fine, text
    _, note, second, *_ = text.splitlines()
    assert note == (
        "note: nothing in these flags asks for IndexCache, so a server with them is plain SGLang. "
        f"What follows is about the same flags with --attention-backend indexcache {STOCK[line]}."
    )
    assert second == "no problem found"
    kept = 21 if "index_topk_freq" in line else 78
    assert f"{kept} of 78 layers keep their indexer" in text


@pytest.mark.parametrize("line", ASKED)
def test_a_line_that_asks_is_not(examined: dict[str, tuple[bool, str]], line: str) -> None:
    fine, text = examined[f"glm-5 {line}"]
    assert fine, text
    assert "plain SGLang" not in text


def test_each_speculation_is_told_by_its_own_evidence(
    examined: dict[str, tuple[bool, str]],
) -> None:
    _, text = examined[f"glm-5 --tp 8 --indexcache-pattern 1/4 {EAGLE} --kv-cache-dtype fp8_e4m3"]
    assert "the draft layer keeps its own indexer (rehearsed" in text
    _, text = examined[f"glm-5 --tp 8 --indexcache-pattern 1/4 {NGRAM}"]
    assert "other speculation" in text
    assert "not tried" in text
    assert "draft layer" not in text


def test_an_even_pattern_is_told_to_be_blind(examined: dict[str, tuple[bool, str]]) -> None:
    _, text = examined[f"deepseek-v3.2 --tp 8 {UNIFORM} --disaggregation-mode prefill"]
    assert "advice: F layers at even distances were chosen blindly" in text
    _, text = examined["glm-5 --tp 8 --indexcache-pattern 1/4"]
    assert "advice" not in text


def test_the_first_line_says_that_this_machine_has_no_gpu(
    examined: dict[str, tuple[bool, str]],
) -> None:
    _, text = next(iter(examined.values()))
    assert text.startswith(
        "checked for: a node of 8 NVIDIA H200 (this machine has no GPU; --device may also be cpu, "
        "h100, b200)\n"
    )


@pytest.mark.parametrize(("line", "reasons"), REFUSED, ids=[line for line, _ in REFUSED])
def test_every_reason_is_told_in_one_run_and_holds_on_a_gpu_node(
    examined: dict[str, tuple[bool, str]], line: str, reasons: list[str]
) -> None:
    fine, text = examined[f"glm-5 {line}"]
    assert not fine
    problems = [line for line in text.splitlines() if line.startswith("problem")]
    assert len(problems) == len(reasons), text
    for problem, reason in zip(problems, reasons, strict=True):
        assert reason in problem
    assert "needs a GPU" not in text
