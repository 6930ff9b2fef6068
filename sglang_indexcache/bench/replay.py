"""Traffic replay: TTFT and TPOT percentiles under production-shaped load, prefix cache on.

The load is SGLang's own ``benchmark.serving`` with its agentic-trace dataset, which replays each
conversation turn by turn and feeds the server's real answers back, so that later turns hit the
prefix cache. What it lacks is added here: several servers in turns, a check that every turn was
answered in full, that later turns did hit the cache, and that the pattern was in effect.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from sglang_indexcache.bench.environment import Environment, busy_cores, environment
from sglang_indexcache.bench.latency import Target
from sglang_indexcache.bench.results import Configuration, Model, ServerFacts, Strict
from sglang_indexcache.bench.servers import Servers, check_served, check_skipped, server_facts
from sglang_indexcache.bench.stream import stream
from sglang_indexcache.bench.traffic import Mix, Session, Words, random_prompts, sessions, trace
from sglang_indexcache.client import Client
from sglang_indexcache.errors import BenchError

Quantity = Literal["ttft", "tpot"]
QUANTITIES: tuple[Quantity, ...] = ("ttft", "tpot")


def nearest_rank(values: Sequence[float], percent: int) -> float:
    """The smallest value that at least ``percent`` of all do not exceed."""
    return sorted(values)[max(0, -(-percent * len(values) // 100) - 1)]


class Turn(Strict):
    """One request.

    Attributes:
        session: which conversation.
        turn: from 0.
        prompt: tokens, as the server counted them.
        cached: of them, taken from the prefix cache.
        ttft: seconds.
        tpot: seconds a token after the first.
    """

    session: int
    turn: int
    prompt: int
    cached: int
    ttft: float = Field(gt=0)
    tpot: float = Field(gt=0)


class Replay(Strict):
    """All turns on one server.

    Attributes:
        configuration: which.
        round: from 0.
        facts: what the server said.
        busy_cores: foreign work before it began.
        seconds: in all.
        turns: every one.
    """

    configuration: str
    round: int
    facts: ServerFacts
    busy_cores: float | None
    seconds: float
    turns: tuple[Turn, ...]

    def percentile(self, quantity: Quantity, percent: int) -> float:
        """Of TTFT or TPOT over the turns."""
        return nearest_rank([getattr(turn, quantity) for turn in self.turns], percent)

    @property
    def hit_rate(self) -> float:
        """Part of the prompt tokens that came from the prefix cache."""
        return sum(turn.cached for turn in self.turns) / sum(turn.prompt for turn in self.turns)


class ReplayResult(Strict):
    """One run of ``indexcache bench replay``.

    Attributes:
        kind: tells result files apart.
        environment: of the client.
        started_here: as for a latency result.
        model: what was served.
        arguments: server flags.
        configurations: the first is the baseline.
        mix: what was sent.
        replays: one for every configuration and round.
    """

    kind: Literal["replay"] = "replay"
    environment: Environment
    started_here: bool
    model: Model
    arguments: tuple[str, ...]
    configurations: tuple[Configuration, ...]
    mix: Mix
    replays: tuple[Replay, ...]

    @property
    def on_gpu(self) -> bool:
        """Whether absolute figures may be shown."""
        return all(replay.facts.device == "cuda" for replay in self.replays)

    @property
    def percentiles(self) -> tuple[int, ...]:
        """Of 50, 90 and 99, those that the turns of one replay can tell from the largest value."""
        turns = len(self.replays[0].turns)
        return tuple(p for p in (50, 90, 99) if turns * (100 - p) >= 100)

    def of(self, configuration: str) -> list[Replay]:
        """Its replays, by round."""
        return [replay for replay in self.replays if replay.configuration == configuration]

    def speedups(self, configuration: str, quantity: Quantity, percent: int) -> list[float]:
        """Baseline over ``configuration``, of each round."""
        pairs = zip(self.of(self.configurations[0].name), self.of(configuration), strict=True)
        return [
            base.percentile(quantity, percent) / mine.percentile(quantity, percent)
            for base, mine in pairs
        ]


def run(
    target: Target,
    model: Path,
    servers: Servers,
    served: Sequence[Configuration],
    mix: Mix,
    folder: Path,
    *,
    rounds: int = 2,
    arguments: Sequence[str] = (),
    report: Callable[[str], None] = lambda _: None,
) -> ReplayResult:
    """Replay the same traffic on every configuration, in turns.

    Args:
        target: the model.
        model: its folder, for the tokenizer.
        servers: where it is served, with the radix cache on.
        served: the first is the baseline.
        mix: what to send.
        folder: for traces and logs.
        rounds: visits to every configuration; each has texts of its own.
        arguments: the servers' flags, for the record.
        report: told what is going on.

    Raises:
        IndexCacheError: naming what a server did wrong.
    """
    conversations = sessions(mix)
    words = Words.of(model)
    machine = environment()
    folder.mkdir(parents=True, exist_ok=True)
    replays = []
    for number in range(rounds):
        path = folder / f"trace-{number}.json"
        path.write_text(json.dumps(trace(mix, conversations, words, str(number))))
        for configuration in served:
            report(f"round {number + 1} of {rounds}: {configuration.name}")
            foreign = busy_cores()
            with servers.visit(configuration) as client:
                check_served(client, configuration, target.model)
                here = server_facts(client)
                _check_room(here, mix)
                before = client.states()
                _warm_up(client, here, target.vocab_size)
                raw = _drive(client, model, path, mix, folder)
                check_skipped(before, client)
                check_served(client, configuration, target.model)
            turns = read_turns(raw, conversations, mix)
            replays.append(
                Replay(
                    configuration=configuration.name,
                    round=number,
                    facts=here,
                    busy_cores=foreign,
                    seconds=raw["duration"],
                    turns=turns,
                )
            )
            report(f"  {len(turns)} turns, {replays[-1].hit_rate:.0%} of the prompts cached")
    return ReplayResult(
        environment=machine,
        started_here=servers.started_here,
        model=target.model,
        arguments=tuple(arguments),
        configurations=tuple(served),
        mix=mix,
        replays=tuple(replays),
    )


def _check_room(here: ServerFacts, mix: Mix) -> None:
    if mix.limit + here.page > here.capacity:
        raise BenchError(
            f"the KV cache holds {here.capacity} tokens a rank, fewer than the longest session of "
            f"{mix.limit}. Lower --context."
        )


def _warm_up(client: Client, here: ServerFacts, vocab_size: int) -> None:
    """Pay for the first chunk and the first decode steps, then forget the prompt."""
    length = max(64, min(here.chunked_prefill, here.capacity // 2))
    client.flush_cache()
    stream(client, random_prompts(here.dp, length, vocab_size, "warm-up"), 4)
    client.flush_cache()


def _drive(client: Client, model: Path, path: Path, mix: Mix, folder: Path) -> dict[str, Any]:
    """Run SGLang's benchmark against the server; returns what it measured.

    Raises:
        BenchError: it ended early or wrote nothing.
    """
    output, log = folder / "serving.jsonl", folder / "serving.log"
    output.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "sglang.benchmark.serving"),
        *("--backend", "sglang-oai-chat", "--base-url", client.url),
        *("--model", str(model), "--tokenizer", str(model)),
        *("--dataset-name", "agentic-trace", "--dataset-path", str(path)),
        *("--num-prompts", str(mix.sessions), "--sharegpt-output-len", str(mix.answer)),
        *("--max-concurrency", str(mix.concurrency), "--seed", str(mix.seed)),
        *("--warmup-requests", "0", "--disable-tqdm", "--cache-report"),
        *("--output-file", str(output), "--output-details"),
    ]
    with log.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
    if done.returncode or not output.exists():
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise BenchError(f"sglang.benchmark.serving gave no result:\n{tail}")
    raw: dict[str, Any] = json.loads(output.read_text().splitlines()[-1])
    return raw


def read_turns(raw: dict[str, Any], conversations: Sequence[Session], mix: Mix) -> tuple[Turn, ...]:
    """Check what SGLang's benchmark reports and give it a form.

    Raises:
        BenchError: a failed or missing turn, a truncated prompt, a short answer, no cache hits.
    """
    expected = [
        (session, turn, sum(one.turns[: turn + 1]))
        for session, one in enumerate(conversations)
        for turn in range(len(one.turns))
    ]
    errors = [error for error in raw["errors"] if error]
    if errors:
        last = errors[0].strip().splitlines()[-1]
        raise BenchError(f"{len(errors)} of {len(expected)} turns failed: {last}")
    if len(raw["ttfts"]) != len(expected):
        raise BenchError(f"{len(raw['ttfts'])} of {len(expected)} turns were answered")
    turns = []
    for place, (session, turn, tokens) in enumerate(expected):
        prompt, answer = raw["input_lens"][place], raw["output_lens"][place]
        if prompt < mix.system + tokens:
            raise BenchError(
                f"session {session}, turn {turn}: the server read {prompt} of at least "
                f"{mix.system + tokens} prompt tokens"
            )
        if answer != mix.answer:
            raise BenchError(
                f"session {session}, turn {turn}: {answer} of {mix.answer} tokens were generated"
            )
        turns.append(
            Turn(
                session=session,
                turn=turn,
                prompt=prompt,
                cached=raw["cached_tokens"][place] or 0,
                ttft=raw["ttfts"][place],
                tpot=sum(raw["itls"][place]) / (answer - 1),
            )
        )
    later = [turn for turn in turns if turn.turn]
    if later and not any(turn.cached for turn in later):
        raise BenchError(
            "no later turn hit the prefix cache. Start the servers without --disable-radix-cache, "
            "or with a KV pool that outlasts a conversation."
        )
    return tuple(turns)
