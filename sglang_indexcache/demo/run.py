"""The demo: the real server twice, every indexer on and then a quarter of them, side by side."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from openai import OpenAI
from rich.console import Console
from rich.table import Table

from sglang_indexcache.client import Server
from sglang_indexcache.demo.checkpoints import shipped_checkpoint
from sglang_indexcache.support.text import machine_text

PROMPT_CHARACTERS = 15_000
"""About 6,000 tokens of the demo tokenizer."""
ANSWER_TOKENS = 48
QUESTIONS = 32
QUESTION_TOKENS = 480
"""Of each question's document: several times index_topk, as long as the model was trained for."""
PATTERNS = ("full", "1/4")


@dataclass(frozen=True)
class Question:
    """A document with facts hidden in source text, that ends by asking for one of them.

    Attributes:
        prompt: token ids.
        fact: the line that holds the answer.
        ending: the prompt's last line.
        answer: what must follow, one token.
    """

    prompt: list[int]
    fact: str
    ending: str
    answer: str


@dataclass
class Measurement:
    """What one server did.

    Attributes:
        prompt_tokens: of the long prompt, as the server counted them.
        prefill: seconds to its first token.
        per_token: seconds per generated token after the first.
        full_layers: layers that ran their indexer.
        shared_layers: layers that reused indices.
        index_k_bytes: index-key bytes per token.
        right: questions answered rightly.
    """

    prompt_tokens: int
    prefill: float
    per_token: float
    full_layers: int
    shared_layers: int
    index_k_bytes: int
    right: int


def run(folder: Path, console: Console) -> list[Measurement]:
    """Serve the shipped checkpoint under both patterns and print the comparison.

    Args:
        folder: where the server logs go.
        console: where to print.
    """
    model = shipped_checkpoint()
    console.print(f"checkpoint: {model} (12 layers, trained by this project's own trainer)")
    asked = questions(model, QUESTIONS)
    results = [_serve(pattern, model, asked, folder, console) for pattern in PATTERNS]
    console.print(_table(results))
    return results


def questions(model: Path, count: int, length: int = QUESTION_TOKENS) -> list[Question]:
    """Documents of the training tasks that training never saw, made for the model's tokenizer."""
    from transformers import AutoTokenizer

    from sglang_indexcache.training.data.retrieval import Words, needles
    from sglang_indexcache.training.data.text import Text

    tokenizer = AutoTokenizer.from_pretrained(model)
    words = Words(tokenizer)
    text = Text.of_machine(tokenizer, 400_000).held_out
    found = []
    for number in range(count):
        document = needles(words, text, length, random.Random(f"demo/{number}"))
        asked = document.answer.index(True)
        prompt, answer = document.ids[:asked], tokenizer.decode(document.ids[asked])
        ending = tokenizer.decode(prompt).splitlines()[-1]
        fact = ending.replace("?", "#", 1) + answer
        found.append(Question(prompt, fact, ending, answer))
    return found


def _serve(
    pattern: str, model: Path, asked: list[Question], folder: Path, console: Console
) -> Measurement:
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
        return _measure(server, asked, console)


def _measure(server: Server, asked: list[Question], console: Console) -> Measurement:
    client = OpenAI(base_url=f"{server.client.url}/v1", api_key="none", max_retries=0)
    right = _ask(client, asked, console)  # the first request of a server pays for set-up
    prompt = "".join(machine_text(PROMPT_CHARACTERS))
    started = time.perf_counter()
    arrivals: list[float] = []
    console.print("a long prompt's continuation: ", end="")
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
        right=right,
    )


def _ask(client: OpenAI, asked: list[Question], console: Console) -> int:
    """Ask all questions in one request; show the first; return how many answers were right."""
    reply = client.completions.create(
        model="default", prompt=[q.prompt for q in asked], max_tokens=1, temperature=0.0
    )
    answers = [choice.text for choice in sorted(reply.choices, key=lambda choice: choice.index)]
    right = sum(answer == q.answer for answer, q in zip(answers, asked, strict=True))
    console.print(f"a fact hidden in {len(asked[0].prompt)} tokens of source code: ", end="")
    console.print(f"{asked[0].fact} ... {asked[0].ending}", end="", markup=False, highlight=False)
    console.print(answers[0], style="green", markup=False, highlight=False)
    console.print(f"{right} of {len(asked)} such questions answered rightly")
    return right


def _stream(client: OpenAI, prompt: str, tokens: int) -> Iterator[tuple[str, int]]:
    """The completion in pieces as ``(text, 0)``, then ``("", prompt tokens)``."""
    stream = client.completions.create(
        model="default",
        prompt=prompt,
        max_tokens=tokens,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    for chunk in stream:
        if chunk.usage is not None:
            yield "", chunk.usage.prompt_tokens
        elif chunk.choices and chunk.choices[0].text:
            yield chunk.choices[0].text, 0


def _table(results: list[Measurement]) -> Table:
    base, cached = results
    table = Table(title=f"\n{base.prompt_tokens}-token prompt, this machine's CPU")
    table.add_column("")
    table.add_column("all F", justify="right")
    table.add_column(f"{PATTERNS[1]}, searched", justify="right")
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
    table.add_row(f"right answers of {QUESTIONS}", str(base.right), str(cached.right), "")
    return table
