"""Serve a small model twice on this CPU, all layers F and a quarter of them, asked in turns.

python examples/demo.py [FOLDER]        # or: make demo

The model has 12 layers and comes with the package; 1/4 is a searched pattern. Both servers answer
the same questions, then read the same long prompts. It takes a few minutes on two quiet cores;
Ctrl-C stops both servers. FOLDER, `.demo` by default, gets demo.json and the servers' logs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoTokenizer

from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.lab.client.launch import Server
from sglang_indexcache.lab.client.stream import stream
from sglang_indexcache.lab.data.words import haystack
from sglang_indexcache.lab.demo import shipped_checkpoint
from sglang_indexcache.lab.evaluate.tasks import TASKS
from sglang_indexcache.lab.evaluate.tasks.context import make_context
from sglang_indexcache.lab.runs.provenance import busy_cores, machine
from sglang_indexcache.library.writing import write_json

PATTERNS = {"all F": "full", "1/4": "1/4"}
CONTEXTS, CONTEXT_TOKENS = 4, 256
"""Texts with eight questions behind each, four times as long as what a layer selects."""
ROUNDS, PROMPT_TOKENS, NEW_TOKENS = 6, 4096, 32
"""Servers of equal speed give six ratios on one side of 1 in 1 of 32 demos; three, in 1 of 4."""

Times = dict[str, list[float]]
"""Seconds of each round by the server's name."""


def start(folder: Path, stack: ExitStack) -> dict[str, Client]:
    """Start both servers at once and wait for both; ``stack`` stops them, whatever happens."""
    environment = {
        "TMPDIR": stack.enter_context(TemporaryDirectory()),  # SGLang leaves its sockets there
        "CUDA_VISIBLE_DEVICES": "",  # the model is too narrow for a GPU's kernels
        "OMP_NUM_THREADS": "1",  # two would wait for each other wherever a core has other work
    }
    servers = {}
    for name, pattern in PATTERNS.items():
        arguments = ["--model-path", str(shipped_checkpoint()), "--max-total-tokens", "16384"]
        arguments += ["--attention-backend", "indexcache", "--indexcache-pattern", pattern]
        servers[name] = Server(
            arguments, folder / f"{name.replace('/', 'of')}.log", env=environment
        )
        stack.callback(servers[name].stop, 1.0)
        servers[name].start()
    return {name: server.wait_until_ready() for name, server in servers.items()}


def questions(tokenizer: Any) -> list[tuple[list[int], str]]:
    """Return prompts that ask for a note in a text, each with its answer of one token."""
    contexts = [
        make_context("notes", TASKS["notes"], tokenizer, CONTEXT_TOKENS, seed)
        for seed in range(CONTEXTS)
    ]
    return [
        (context.ids + question.ids, question.answer_text)
        for context in contexts
        for question in context.questions
    ]


def prompts(tokenizer: Any) -> list[list[int]]:
    """Return one prompt more than rounds, none of which begins like another."""
    text = haystack()[: 8 * PROMPT_TOKENS * (1 + ROUNDS)]
    [ids] = tokenizer([text], add_special_tokens=False)["input_ids"]
    return [ids[n * PROMPT_TOKENS : (n + 1) * PROMPT_TOKENS] for n in range(1 + ROUNDS)]


def answers(client: Client, texts: Sequence[list[int]]) -> list[str]:
    """Return the token with which each prompt is answered."""
    sampling = {"max_new_tokens": 1, "temperature": 0.0}
    replies = client.generate(input_ids=list(texts), sampling_params=sampling)
    return [reply["text"] for reply in replies]


def race(clients: Mapping[str, Client], texts: Sequence[list[int]]) -> tuple[Times, Times]:
    """Time every server on every prompt but the first, which warms up; one server at a time.

    Who goes first changes from round to round, so a machine that gets slower favours nobody.

    Returns:
        Seconds to the first token, and seconds of each token behind it.
    """
    prefill: Times = {name: [] for name in clients}
    per_token: Times = {name: [] for name in clients}
    for number, text in enumerate(texts):
        for name in list(clients)[:: 1 if number % 2 else -1]:
            [answer] = stream(clients[name], [text], NEW_TOKENS)
            if number:
                prefill[name].append(answer.first_token)
                per_token[name].append(1 / answer.decode_rate)
        print(f"round {number} of {len(texts) - 1}" if number else "warmed up", flush=True)
    return prefill, per_token


def times_faster(base: Sequence[float], sharing: Sequence[float]) -> str:
    """Say how many times as fast ``sharing`` was, but only if all rounds say who is faster."""
    ratios = [slow / fast for slow, fast in zip(base, sharing, strict=True)]
    between = f"{min(ratios):.2f}x to {max(ratios):.2f}x"
    if len(ratios) < ROUNDS or min(ratios) <= 1 <= max(ratios):
        return f"no difference shown ({between})"
    return f"{median(ratios):.2f}x ({between})"


def main(folder: Path) -> None:
    """Serve, ask, time, and print what that shows."""
    folder.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"environment": machine(), "busy_cores": busy_cores()}
    tokenizer = AutoTokenizer.from_pretrained(shipped_checkpoint())
    material = questions(tokenizer)
    with ExitStack() as stack:
        print("starting both servers", flush=True)
        clients = start(folder, stack)
        replies = {
            name: answers(client, [ids for ids, _ in material]) for name, client in clients.items()
        }
        prefill, per_token = race(clients, prompts(tokenizer))
        states = {name: client.states()[0] for name, client in clients.items()}
    record |= {"answers": replies, "prefill": prefill, "per_token": per_token}
    write_json(folder / "demo.json", record)
    for name, state in states.items():
        right = sum(a == b for a, (_, b) in zip(replies[name], material, strict=True))
        print(
            f"{name}: {state.full_layers} layers with an indexer, {state.shared_layers} without, "
            f"{state.index_k_bytes_per_token} bytes of index keys a token; {right} of "
            f"{len(material)} answers right; median prefill {median(prefill[name]):.2f} s, "
            f"{1000 * median(per_token[name]):.0f} ms a token"
        )
    base, sharing = PATTERNS
    print(
        f"{sharing} against {base}, {PROMPT_TOKENS} tokens: prefill "
        f"{times_faster(prefill[base], prefill[sharing])}, decode "
        f"{times_faster(per_token[base], per_token[sharing])}. A small model on a CPU says nothing "
        "about a GPU's speed, and so few questions can only show a large difference.\nEvery "
        f"sample is in {folder / 'demo.json'}. Next, for your own model: indexcache server doctor "
        "--model-path MODEL --indexcache-pattern 1/4"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ".demo"))
