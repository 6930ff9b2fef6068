"""The demo: the real server twice, every indexer on and then a quarter of them, side by side."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from openai import OpenAI
from rich.console import Console
from rich.table import Table

from sglang_indexcache.demo_model import ModelSpec, machine_text, make_model
from sglang_indexcache.serving import Server

PROMPT_CHARACTERS = 22_000
"""About 6,000 tokens of the demo tokenizer."""
ANSWER_TOKENS = 48
PATTERNS = ("full", "uniform:1/4")


@dataclass
class Measurement:
    """One served request.

    Attributes:
        prompt_tokens: as the server counted them.
        prefill: seconds to the first token.
        per_token: seconds per generated token after the first.
        full_layers: layers that ran their indexer.
        shared_layers: layers that reused indices.
        index_k_bytes: index-key bytes per token.
    """

    prompt_tokens: int
    prefill: float
    per_token: float
    full_layers: int
    shared_layers: int
    index_k_bytes: int


def run(folder: Path, console: Console) -> list[Measurement]:
    """Make the checkpoint if it is missing, serve it under both patterns, print the comparison.

    Args:
        folder: where the checkpoint and the server logs go.
        console: where to print.
    """
    model = folder / "model"
    if not (model / "config.json").exists():
        with console.status("making a small GLM-5-shaped checkpoint (random weights) ..."):
            make_model(ModelSpec(preset="glm-5", size="small"), model)
    console.print(f"checkpoint: {model} (12 layers, random weights: the text will be noise)")
    results = [_serve(pattern, model, folder, console) for pattern in PATTERNS]
    console.print(_table(results))
    return results


def _serve(pattern: str, model: Path, folder: Path, console: Console) -> Measurement:
    arguments = [
        *("--model-path", str(model)),
        *("--attention-backend", "indexcache", "--indexcache-pattern", pattern),
    ]
    command = f"python -m sglang.launch_server {' '.join(arguments)}"
    console.print(f"\n[bold]{command}[/bold]", soft_wrap=True)
    server = Server(arguments, folder / f"server-{pattern.replace('/', '-')}.log")
    with server, console.status("starting the server ...") as status:
        server.wait_until_ready(tick=lambda s: status.update(f"starting the server ... {s:.0f} s"))
        status.stop()
        for line in server.log.read_text(errors="replace").splitlines():
            if "IndexCache (" in line:
                console.print(line, style="dim", markup=False, soft_wrap=True)
        return _measure(server, console)


def _measure(server: Server, console: Console) -> Measurement:
    client = OpenAI(base_url=f"{server.client.url}/v1", api_key="none", max_retries=0)
    for _ in _stream(client, "warm up", 4):  # the first request of a server pays for set-up
        pass
    prompt = "".join(machine_text(PROMPT_CHARACTERS))
    started = time.perf_counter()
    arrivals: list[float] = []
    console.print("answer: ", end="")
    usage = 0
    for text, tokens in _stream(client, prompt, ANSWER_TOKENS):
        if tokens:
            usage = tokens
            continue
        arrivals.append(time.perf_counter() - started)
        console.print(text, end="", style="green", markup=False, highlight=False, soft_wrap=True)
    console.print()
    state = server.client.states()[0]
    return Measurement(
        prompt_tokens=usage,
        prefill=arrivals[0],
        per_token=(arrivals[-1] - arrivals[0]) / (len(arrivals) - 1),
        full_layers=state["full_layers"],
        shared_layers=state["shared_layers"],
        index_k_bytes=state["index_k_bytes_per_token"],
    )


def _stream(client: OpenAI, prompt: str, tokens: int) -> Iterator[tuple[str, int]]:
    """Chat-completion chunks as ``(text, 0)``, then ``("", prompt tokens)``."""
    stream = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": prompt}],
        max_tokens=tokens,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    for chunk in stream:
        if chunk.usage is not None:
            yield "", chunk.usage.prompt_tokens
        elif chunk.choices and chunk.choices[0].delta.content:
            yield chunk.choices[0].delta.content, 0


def _table(results: list[Measurement]) -> Table:
    base, cached = results
    table = Table(title=f"\n{base.prompt_tokens}-token prompt, this machine's CPU")
    table.add_column("")
    table.add_column("all F", justify="right")
    table.add_column("uniform 1/4", justify="right")
    table.add_column("ratio", justify="right")
    rows = (
        ("layers that run their indexer", base.full_layers, cached.full_layers, "d"),
        ("layers that skip it", base.shared_layers, cached.shared_layers, "d"),
        ("index-K bytes per token", base.index_k_bytes, cached.index_k_bytes, "d"),
        ("prefill, s", base.prefill, cached.prefill, ".2f"),
        ("decode, ms per token", 1e3 * base.per_token, 1e3 * cached.per_token, ".1f"),
    )
    for name, first, second, form in rows:
        ratio = f"{first / second:.2f}x" if second and first else ""
        table.add_row(name, format(first, form), format(second, form), ratio)
    return table
