"""The commands as a user types them, without SGLang: against a fake server."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from sglang_indexcache.lab.latency.results import LatencyResult
from tests.cli import output_of
from tests.fakes.server import FakeServer, serving
from tests.lab.latency.test_measure import CONFIG, HALF

HEAVY = {
    *("torch", "scipy", "matplotlib", "transformers", "sglang", "httpx"),
    "sglang_indexcache.lab.latency.results",
}


def modules_of(*arguments: str) -> set[str]:
    """Run a command in a process; return those of :data:`HEAVY` that it has imported at its end."""
    code = (
        "import sys\n"
        "from sglang_indexcache.cli import app\n"
        "try:\n    app(sys.argv[1:])\n"
        "except SystemExit as ended:\n    assert not ended.code, ended.code\n"
        f"print('loaded:', *(set({sorted(HEAVY)!r}) & sys.modules.keys()))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    return set(process.stdout.rpartition("loaded:")[2].split())


def folder(path: Path, config: dict[str, object]) -> str:
    (path / "model").mkdir()
    (path / "model" / "config.json").write_text(json.dumps(config))
    return str(path / "model")


latency = partial(output_of, "bench", "latency")


def test_latency_against_running_servers(tmp_path: Path) -> None:
    model, out = folder(tmp_path, CONFIG), tmp_path / "out"
    with serving(FakeServer("F" * 8)) as first, serving(FakeServer(HALF)) as second:
        text = latency(
            *("--model", model, "-o", out, "--url", first, "--url", second),
            *("--pattern", "full", "--pattern", "half=uniform:1/2", "--context", "256"),
            *("--rounds", "1", "--new-tokens", "6", "--figures", "pdf"),
        )
    assert "+ IndexCache (half)" in text
    result = LatencyResult.model_validate_json((out / "latency.json").read_text())
    assert result.metrics == ("prefill", "decode", "full")
    assert (out / "latency-speedup.pdf").read_bytes().startswith(b"%PDF")
    assert not list(out.glob("*.png"))
    assert "the servers ran already" in (out / "latency.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--url", "http://u", "--url", "http://v"],
            "give one --url, or one for each of full, 1/2, 1/4",
        ),
        (["--url", "http://u", "--", "--tp", "8"], "no server flags"),
        (["--", "--model-path", "x"], "leave --model-path to the benchmark"),
        (["--context", "1K", "--context", "1000"], "the same length was given twice"),
        (["--pattern", "FS"], "too short"),
        (["--figures", "jpg"], "--figures is png, pdf, svg, got 'jpg'"),
    ],
)
def test_latency_that_makes_no_sense(tmp_path: Path, options: list[str], message: str) -> None:
    patterns = [] if "--pattern" in options else ["--pattern", "full", "--pattern"]
    patterns += ["1/2=uniform:1/2", "--pattern", "1/4=uniform:1/4"] if patterns else []
    model = folder(tmp_path, CONFIG)
    text = latency("--model", model, "-o", tmp_path, *patterns, *options, code=1)
    assert message in text


def test_a_plan_is_arithmetic() -> None:
    """No torch, and nothing that draws or talks to servers."""
    plan = ("bench", "plan", "--model", "glm-5-fp8", "--context", "32K", "--pattern", "1/4")
    assert modules_of(*plan) == {"sglang_indexcache.lab.latency.results"}
