"""Hold a server's greedy tokens against transformers': one pattern, another, and both in a batch.

    python -m benchmarks.smollm2.serve_check --model FOLDER

Ten pieces of real books are continued by 64 tokens in float32, by transformers under
``indexer_types`` and by a server in live mode on this machine's CPU. Where they part, transformers
in float64 is asked for the token behind what both said, and its lead over the other's: a server
whose token float64 gives is right. Writes smollm2/serve_check.json after each batch; the exit code
is 1 if a server's token is neither transformers' nor float64's.

Keys that every index head points away from score exactly 0, and where fewer than ``index_topk``
score more, the list is filled from them: as ``torch.topk`` likes in transformers, by the smaller
position in the server. So transformers selects by the server's rule here.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.paper import live_server
from benchmarks.records import read_arguments
from benchmarks.smollm2 import CACHE
from benchmarks.smollm2.books import HELD_OUT, Books
from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.lab.runs.provenance import machine
from sglang_indexcache.library.digest import checkpoint_digest
from sglang_indexcache.library.resolve import Library
from sglang_indexcache.library.writing import write_json
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.protocol import check_answered_under, named

NAME = "smollm2/serve_check.json"
LENGTHS = range(300, 1300, 100)
"""Tokens of the prompts; each selects, for ``index_topk`` is 256."""
NEW_TOKENS = 64

Continued = tuple[list[int], list[float]]
"""Greedy tokens, and the lead of each over the second best in nats."""


def by_transformers(
    model: Path, prompts: Sequence[list[int]], pattern: Pattern, count: int
) -> tuple[list[Continued], Counter[str]]:
    """Continue each prompt by ``count`` tokens in float32; count what their lists end among."""
    network = _load(model, pattern, torch.float32)
    with ties_to_smaller_positions() as lists:
        return [_continue(network, prompt, count) for prompt in prompts], lists


def _load(model: Path, pattern: Pattern, dtype: torch.dtype) -> Any:
    config = AutoConfig.from_pretrained(model)
    config.indexer_types = pattern.to_indexer_types()
    return AutoModelForCausalLM.from_pretrained(
        model, config=config, dtype=dtype, attn_implementation="eager"
    ).eval()


@contextmanager
def ties_to_smaller_positions() -> Iterator[Counter[str]]:
    """Let ``Tensor.topk`` take the first of equal values, as the server's selection does.

    Yields:
        How many rows had more than k values that no mask hides, and of how many of these the last
        that was taken is equal to the first that was left out.
    """
    lists = Counter[str]()

    def topk(scores: torch.Tensor, k: int, dim: int = -1) -> Any:
        values, places = scores.sort(dim=dim, descending=True, stable=True)
        if k < scores.shape[dim]:
            last, next_one = values.select(dim, k - 1), values.select(dim, k)
            choosing = next_one > torch.finfo(scores.dtype).min / 2  # what a mask adds
            lists["lists"] += int(choosing.sum())
            lists["ended among equals"] += int((choosing & (last == next_one)).sum())
        return torch.return_types.topk((values.narrow(dim, 0, k), places.narrow(dim, 0, k)))

    with mock.patch.object(torch.Tensor, "topk", topk):
        yield lists


@torch.no_grad()
def judge(model: Path, rows: Sequence[dict[str, Any]], prompts: Sequence[list[int]]) -> None:
    """Add to each row that parted what float64 says of the two tokens.

    ``float64`` is its own token, and ``float64_lead`` by how many nats it prefers transformers'
    token to the server's; the sum over the vocabulary is the same for both.
    """
    for row in (row for row in rows if "tokens" in row):
        network = _load(model, Pattern(row["pattern"]), torch.float64)
        ids = torch.tensor([prompts[row["prompt"]] + row.pop("before")])
        with ties_to_smaller_positions():
            logits = network(ids, use_cache=False, logits_to_keep=1).logits[0, -1]
        theirs, ours = row["tokens"]
        row["float64"] = int(logits.argmax())
        row["float64_lead"] = float(logits[theirs] - logits[ours])


@torch.no_grad()
def _continue(model: Any, prompt: list[int], count: int) -> Continued:
    ids, cache = torch.tensor([prompt]), DynamicCache(config=model.config)
    # Called past_key_values before transformers 5.24.
    name = next(n for n in ("cache", "past_key_values") if n in signature(model.forward).parameters)
    tokens, leads = [], []
    for _ in range(count):
        output = model(ids, use_cache=True, logits_to_keep=1, **{name: cache})
        best, second = output.logits[0, -1].topk(2).values.tolist()
        tokens.append(int(output.logits[0, -1].argmax()))
        leads.append(best - second)
        ids = torch.tensor([tokens[-1:]])
    return tokens, leads


def by_server(
    client: Client, prompts: Sequence[list[int]], patterns: Sequence[Pattern], count: int
) -> list[list[int]]:
    """Continue all prompts in one batch, each under its own pattern; nothing comes from a cache."""
    client.flush_cache()
    greedily = {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True}
    replies = client.generate(
        input_ids=list(prompts),
        sampling_params=[greedily | named(str(pattern)) for pattern in patterns],
    )
    for reply, pattern in zip(replies, patterns, strict=True):
        check_answered_under(reply["meta_info"], str(pattern), client.name)
    return [reply["output_ids"] for reply in replies]


def compare(
    served: Sequence[list[int]], patterns: Sequence[str], truth: Mapping[str, Sequence[Continued]]
) -> list[dict[str, Any]]:
    """Compare each prompt: how many tokens agree; where they part, the lead and both tokens."""
    rows = []
    for number, (tokens, pattern) in enumerate(zip(served, patterns, strict=True)):
        expected, leads = truth[pattern][number]
        parting = next((n for n, pair in enumerate(zip(tokens, expected, strict=True))
                     if pair[0] != pair[1]), len(expected))  # fmt: skip
        parted: dict[str, Any] = {}
        if parting < len(expected):
            pair = [expected[parting], tokens[parting]]
            parted = {"lead": leads[parting], "tokens": pair, "before": expected[:parting]}
        rows.append({"prompt": number, "pattern": pattern, "equal": parting, **parted})
    return rows


def report(batch: str, rows: Sequence[Mapping[str, Any]], count: int) -> None:
    """Print how many prompts of ``batch`` are equal for ``count`` tokens, and each parting."""
    partings = [row for row in rows if row["equal"] < count]
    print(f"{batch}: {len(rows) - len(partings)} of {len(rows)} prompts equal for {count} tokens")
    for row in partings:
        where = f"prompt {row['prompt']} under {row['pattern']}, token {row['equal']}"
        print(
            f"  {where}: transformers {row['tokens'][0]}, by {row['lead']:.2g} nats; the server "
            f"{row['tokens'][1]}; float64 {row['float64']}, the first by {row['float64_lead']:.2g}",
            flush=True,
        )


def main(argv: list[str] | None = None) -> None:
    """Check, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the checkpoint's folder")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where the books are kept")
    parser.add_argument("--pattern", default="uniform:1/4", help="the one beside all F")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--prompts", type=int, default=len(LENGTHS))
    arguments = read_arguments(parser, NAME, argv, {"prompts": 3, "new_tokens": 16})
    model, count = arguments.model, arguments.new_tokens
    books = Books(arguments.cache, AutoTokenizer.from_pretrained(model))
    cuts = books.cuts(HELD_OUT, arguments.prompts, LENGTHS[-1])
    prompts = [cut[:length].tolist() for cut, length in zip(cuts, LENGTHS, strict=False)]
    checkpoint = Checkpoint.read(model)
    texts = [
        str(Library.default().resolve(name, checkpoint).pattern)
        for name in ("full", arguments.pattern)
    ]
    started = time.monotonic()
    by_pattern = {text: by_transformers(model, prompts, Pattern(text), count) for text in texts}
    truth = {text: continued for text, (continued, _) in by_pattern.items()}
    print(f"transformers: {time.monotonic() - started:.0f} s", flush=True)
    batches = {text: [text] * len(prompts) for text in texts}
    batches["mixed"] = [texts[number % 2] for number in range(len(prompts))]
    record = {
        "command": arguments.command,
        "environment": machine(),
        "checkpoint": checkpoint_digest(model),
        "index_topk": checkpoint.shape["index_topk"],
        "tokens": [len(prompt) for prompt in prompts],
        "new_tokens": count,
        "lists": {text: lists for text, (_, lists) in by_pattern.items()},
    }
    rows: dict[str, list[dict[str, Any]]] = {}
    with live_server(model, arguments.output.with_suffix(".log")) as url:
        client = Client(url)
        for name, chosen in batches.items():
            before = client.states()[0].mixed_forwards
            served = by_server(client, prompts, [Pattern(text) for text in chosen], count)
            mixed = client.states()[0].mixed_forwards - before
            if bool(mixed) != (name == "mixed"):
                sys.exit(f"{mixed} forwards of the batch {name} held requests of both patterns")
            rows[name] = compare(served, chosen, truth)
            judge(model, rows[name], prompts)
            report(name, rows[name], count)
            write_json(arguments.output, record | {"batches": rows})
    parted = [row for batch in rows.values() for row in batch if row["equal"] < count]
    if any(row["float64"] != row["tokens"][1] for row in parted):
        sys.exit(f"a server's tokens differ from float64's; {arguments.output} says where")


if __name__ == "__main__":
    main()
