"""The protocol between servers and the package is written down once."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

PLACES = {
    "custom_params": {"serving/protocol.py"},
    "input_token_logprobs": {"lab/client/score.py"},
    "logprob_start_len": {"lab/client/score.py"},
    "top_logprobs_num": {"lab/client/score.py"},
    "cached_tokens": {"lab/client/score.py", "lab/client/stream.py", "lab/evaluate/servers.py"},
    "indexcache_pattern": {"serving/protocol.py", "serving/options.py"},
}
"""Words of the protocol, and the only modules that may spell them."""


@pytest.mark.parametrize("word", PLACES)
def test_a_word_of_the_protocol_is_spelt_where_its_rule_is(word: str) -> None:
    places = set()
    for path in (ROOT / "sglang_indexcache").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        strings = [node.value for node in nodes if isinstance(node, ast.Constant)]
        if word in strings or word in [n.arg for n in nodes if isinstance(n, ast.keyword)]:
            places.add(path.relative_to(ROOT / "sglang_indexcache").as_posix())
    assert places == PLACES[word]
