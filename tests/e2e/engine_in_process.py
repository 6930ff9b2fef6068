"""Run by ``test_openai_api.py`` in a process of its own: SGLang's Engine with our keyword."""

from __future__ import annotations

import json
import sys

import sglang

from sglang_indexcache.errors import PatternError


def start(pattern: str) -> sglang.Engine:
    return sglang.Engine(
        model_path=sys.argv[1],
        attention_backend="indexcache",
        indexcache_pattern=pattern,
        max_total_tokens=4096,
        dtype="float32",
        log_level="error",
    )


if __name__ == "__main__":
    try:
        start("FSS")
    except PatternError as error:
        refusal = str(error)
    engine = start("FSSFSS")
    state = engine.get_server_info()["internal_states"][0]["indexcache"]
    output = engine.generate(
        input_ids=list(range(20, 120)),
        sampling_params={"max_new_tokens": 4, "temperature": 0.0},
    )
    print("RESULT", json.dumps([refusal, state["pattern"], state["source"], output["output_ids"]]))
    engine.shutdown()
