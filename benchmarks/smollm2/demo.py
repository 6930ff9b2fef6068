"""Ask a real model the same questions about a real document, under all F and under a pattern.

    python -m benchmarks.smollm2.demo

The model is built first if it is not there. A server in live mode on this machine's CPU answers
each question twice. Printed are both answers side by side, how long the document's prefill took,
and which layers skipped their indexers. One prefill of each is no measurement of speed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.paper import live_server
from benchmarks.records import RESULTS
from benchmarks.smollm2 import CACHE
from benchmarks.smollm2.books import HELD_OUT, Books
from benchmarks.smollm2.build import VARIANTS, build
from benchmarks.smollm2.workers import one_thread
from sglang_indexcache.cli.common import out
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.lab.client.stream import stream
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.client_rules import check_answered_under
from sglang_indexcache.serving.protocol import named

DOCUMENT_TOKENS = 3072
QUESTIONS = (
    "What is the document above about? Answer in one sentence.",
    "Name one command line option or function that the document mentions.",
)
NEW_TOKENS = 48
SEARCHED = RESULTS / "smollm2/searched.json"


def searched_pattern(ratio: str) -> Pattern:
    """Return what the committed record's first search found at a ratio."""
    record = json.loads(SEARCHED.read_text(encoding="utf-8"))
    return Pattern(record["searches"][0]["patterns"][ratio])


def main() -> None:
    """Build if need be, serve, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="the checkpoint; default: built below --cache")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where everything is kept")
    parser.add_argument("--pattern", type=Pattern, default=None, help="default: the searched 1/8")
    arguments = parser.parse_args()
    model: Path = arguments.model or arguments.cache / "built"
    if not (model / "config.json").exists():
        one_thread()
        build(model, arguments.cache, VARIANTS["built"], None, out.print)
    ask(model, arguments.cache, arguments.pattern or searched_pattern("1/8"))


def ask(model: Path, cache: Path, pattern: Pattern) -> None:
    """Serve the model, ask it under all F and under the pattern, and print both answers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    patterns = [Pattern.full(len(pattern)), pattern]
    [cut] = Books(cache, tokenizer).cuts(HELD_OUT[:1], 1, DOCUMENT_TOKENS)
    document = tokenizer.decode(cut)
    turns = [[{"role": "user", "content": f"{document}\n\n{question}"}] for question in QUESTIONS]
    prompts = [
        tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
        for turn in turns
    ]
    table = Table("", *(entry.summary() for entry in patterns), box=SIMPLE_HEAD)
    for column in table.columns:
        column.overflow = "fold"  # a pattern is one long word
    prefills, skipped, answers = [], [], []
    out.print(f"serving {model} on this CPU; {len(prompts[0]):,} tokens of a document to read ...")
    with (
        tempfile.TemporaryDirectory() as folder,
        live_server(model, Path(folder) / "server.log") as url,
    ):
        client = Client(url)
        for choice in patterns:
            before = client.states()[0].indexer_selections
            [timed] = stream(client, [prompts[0]], 2, pattern=str(choice))
            after = client.states()[0].indexer_selections
            prefills.append(f"{timed.first_token:.1f} s for {len(prompts[0]):,} tokens")
            idle = sum(new == old for old, new in zip(before, after, strict=True))
            skipped.append(f"{idle} of {len(pattern)}")
            greedily = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0} | named(str(choice))
            replies = client.generate(input_ids=prompts, sampling_params=greedily)
            for reply in replies:
                check_answered_under(reply["meta_info"], str(choice), client.name)
            answers.append([reply["text"].strip() for reply in replies])
            out.print(f"{choice}: answered")
    table.add_row("pattern", *map(str, patterns))
    table.add_row("prefill", *prefills)
    table.add_row("layers that skipped", *skipped)
    for question, *texts in zip(QUESTIONS, *answers, strict=True):
        table.add_row(question, *texts)
    out.print(table)


if __name__ == "__main__":
    main()
