"""Ask one real model the same questions about a real document, under all F and under a pattern.

    python -m benchmarks.smollm2.demo --model FOLDER

A server in live mode on this machine's CPU answers each question twice. Printed are both answers
side by side, how long the document's prefill took, and which layers skipped their indexers.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from transformers import AutoTokenizer

from benchmarks.paper import live_server
from benchmarks.smollm2 import CACHE
from benchmarks.smollm2.books import HELD_OUT, Books
from sglang_indexcache.ask.client import Client
from sglang_indexcache.ask.protocol import check_answered_under, named
from sglang_indexcache.ask.stream import stream
from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.cli.common import out
from sglang_indexcache.errors import IndexCacheError
from sglang_indexcache.library import Library
from sglang_indexcache.pattern import Pattern

DOCUMENT_TOKENS = 3072
QUESTIONS = (
    "What is the document above about? Answer in one sentence.",
    "Name one command line option or function that the document mentions.",
)
NEW_TOKENS = 48


def chosen_pattern(checkpoint: Checkpoint) -> Pattern:
    """The searched 1/4 of this model, else SGLang's frequency schedule, whose layer 1 is F."""
    try:
        return Library.default().resolve("1/4", checkpoint).pattern
    except IndexCacheError:
        return Pattern.from_freq(checkpoint.num_layers, 4)


def main() -> None:
    """Serve, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the checkpoint's folder")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where the books are kept")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    checkpoint = Checkpoint.read(arguments.model)
    patterns = [Pattern("F" * checkpoint.num_layers), chosen_pattern(checkpoint)]
    [cut] = Books(arguments.cache, tokenizer).cuts(HELD_OUT[:1], 1, DOCUMENT_TOKENS)
    document = tokenizer.decode(cut)
    turns = [[{"role": "user", "content": f"{document}\n\n{question}"}] for question in QUESTIONS]
    prompts = [
        tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
        for turn in turns
    ]
    table = Table("", *(f"{one.summary()}" for one in patterns), box=SIMPLE_HEAD)
    prefills, skipped, answers = [], [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        live_server(arguments.model, Path(folder) / "server.log") as url,
    ):
        client = Client(url)
        for pattern in patterns:
            before = client.states()[0]
            [timed] = stream(client, [prompts[0]], 2, pattern=str(pattern))
            after = client.states()[0]
            prefills.append(f"{timed.first_token:.1f} s for {len(prompts[0]):,} tokens")
            ran = zip(before.indexer_selections, after.indexer_selections, strict=True)
            idle = [layer for layer, (old, new) in enumerate(ran) if new == old]
            skipped.append(f"{len(idle)} of {checkpoint.num_layers}: {idle or 'none'}")
            greedily = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0} | named(str(pattern))
            replies = client.generate(input_ids=prompts, sampling_params=greedily)
            for reply in replies:
                check_answered_under(reply["meta_info"], str(pattern), client.name)
            answers.append([reply["text"].strip() for reply in replies])
    table.add_row("pattern", *map(str, patterns))
    table.add_row("prefill", *prefills)
    table.add_row("layers that skipped", *skipped)
    for question, *both in zip(QUESTIONS, *answers, strict=True):
        table.add_row(question, *both)
    out.print(table)


if __name__ == "__main__":
    main()
