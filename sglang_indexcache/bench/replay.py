"""Traffic replay: TTFT and TPOT percentiles under production-shaped load, prefix cache on.

The load is SGLang's own ``benchmark.serving`` with its agentic-trace dataset, which replays each
conversation turn by turn and feeds the server's real answers back, so that later turns hit the
prefix cache. What it lacks is added here: several servers in turns, a check that every turn was
answered in full, that later turns did hit the cache, and that the pattern was in effect.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

from pydantic import Field

from sglang_indexcache.ask.client import Client
from sglang_indexcache.ask.protocol import check_obeyed, named
from sglang_indexcache.ask.stream import stream
from sglang_indexcache.bench import figures
from sglang_indexcache.bench.environment import Environment, busy_cores, environment
from sglang_indexcache.bench.latency import Target
from sglang_indexcache.bench.results import Configuration, Model, ServerFacts, Strict, save
from sglang_indexcache.bench.servers import Servers, check_served, server_facts
from sglang_indexcache.bench.tables import Grid, foreign_work, what_was_served, where_and_when
from sglang_indexcache.bench.traffic import Mix, Session, Words, random_prompts, sessions, trace
from sglang_indexcache.errors import BenchError
from sglang_indexcache.support.files import write_whole
from sglang_indexcache.support.lengths import format_length

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
                pattern = configuration.pattern if here.mode == "live" else None
                _warm_up(client, here, target.vocab_size, pattern)
                raw = _drive(client, model, path, mix, folder, pattern)
                check_obeyed(
                    before, client.states(), [configuration.pattern], client.name, alone=True
                )
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


def _warm_up(client: Client, here: ServerFacts, vocab_size: int, pattern: str | None) -> None:
    """Pay for the first chunk and the first decode steps, then forget the prompt."""
    length = max(64, min(here.chunked_prefill, here.capacity // 2))
    client.flush_cache()
    stream(client, random_prompts(here.dp, length, vocab_size, "warm-up"), 4, pattern=pattern)
    client.flush_cache()


def _drive(
    client: Client, model: Path, path: Path, mix: Mix, folder: Path, pattern: str | None
) -> dict[str, Any]:
    """Run SGLang's benchmark against the server; returns what it measured.

    Every request names ``pattern``, if there is one.

    Raises:
        BenchError: it ended early or wrote nothing.
    """
    log = folder / "serving.log"
    # SGLang's benchmark also writes down all that the server tells of itself, API keys among it.
    with TemporaryDirectory() as scratch:
        output = Path(scratch) / "serving.jsonl"
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
        if pattern is not None:
            command += ["--extra-request-body", json.dumps(named(pattern))]
        variables = {**os.environ, **client.environment_for_sglang()}
        with log.open("w") as file:
            done = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, check=False, env=variables
            )
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


def replay_grid(result: ReplayResult) -> Grid:
    """Percentiles: absolute on a GPU, speed-ups over the baseline on a CPU.

    A speed-up is the median over the rounds, the lowest and the highest of them behind it.
    """
    percentiles = [(quantity, p) for quantity in QUANTITIES for p in result.percentiles]
    header = ("", *(f"{q.upper()} P{p}" for q, p in percentiles), "prompt tokens cached")
    rows = []
    for configuration in result.configurations:
        cells = [_cell(result, configuration, quantity, p) for quantity, p in percentiles]
        hits = median(replay.hit_rate for replay in result.of(configuration.name))
        rows.append((configuration.name, *cells, f"{hits:.0%}"))
    where = "GPU" if result.on_gpu else "CPU"
    title = f"{result.model.name}, traffic, {where}, median of {_rounds(result)} rounds"
    return Grid(f"{title} (lowest to highest)", header, tuple(rows))


def _rounds(result: ReplayResult) -> int:
    return len(result.of(result.configurations[0].name))


def _cell(
    result: ReplayResult, configuration: Configuration, quantity: Quantity, percent: int
) -> str:
    is_baseline = configuration == result.configurations[0]
    speeds = result.speedups(configuration.name, quantity, percent)
    speed = f"{median(speeds):.2f}x ({min(speeds):.2f}-{max(speeds):.2f})"
    if not result.on_gpu:
        return "1" if is_baseline else speed
    replays = result.of(configuration.name)
    middle = 1e3 * median(replay.percentile(quantity, percent) for replay in replays)
    shown = f"{middle:.0f} ms" if middle >= 100 else f"{middle:.3g} ms"
    return shown if is_baseline else f"{shown}, {speed}"


def conditions(result: ReplayResult) -> str:
    """What was sent, and how it was measured, in a few sentences."""
    mix = result.mix
    first = result.replays[0].turns
    prompts = [turn.prompt for turn in first]
    last = {turn.session: turn.prompt for turn in first}
    order = " ".join(configuration.name for configuration in result.configurations)
    lines = [
        *where_and_when(result.environment, result.started_here),
        f"{_rounds(result)} rounds of [{order}]; a round sends {mix.sessions} sessions of "
        f"{len(first)} turns in all, {mix.concurrency} sessions at once, {mix.answer} tokens an "
        f"answer, {mix.system} tokens of system prompt that all share.",
        f"Prompt tokens of a turn: P50 {nearest_rank(prompts, 50):.0f}, P90 "
        f"{nearest_rank(prompts, 90):.0f}, most {max(prompts)}; of a session's last turn: P50 "
        f"{nearest_rank(list(last.values()), 50):.0f}, P90 "
        f"{nearest_rank(list(last.values()), 90):.0f} (sessions are cut at "
        f"{format_length(mix.limit)}).",
        "Seconds are the client's wall clock and include waiting for other sessions.",
    ]
    lines += foreign_work(result.environment, [replay.busy_cores for replay in result.replays])
    modes = {replay.facts.mode for replay in result.replays}
    lines += what_was_served(result.model, result.arguments, modes)
    return "\n".join(lines) + "\n"


def to_markdown(result: ReplayResult) -> str:
    """Everything about a replay."""
    return replay_grid(result).to_markdown() + "\n" + conditions(result)


def turn_curves(result: ReplayResult) -> dict[str, dict[str, list[float]]]:
    """Times of all turns of all rounds by quantity and configuration, in order.

    They are relative to the baseline's median on a CPU, whose absolute times mean nothing.
    """

    def times(name: str, quantity: Quantity) -> list[float]:
        turns = (turn for replay in result.of(name) for turn in replay.turns)
        return sorted(getattr(turn, quantity) for turn in turns)

    names = [configuration.name for configuration in result.configurations]
    curves = {}
    for quantity in QUANTITIES:
        base = times(names[0], quantity)
        unit = 1e-3 if result.on_gpu else base[len(base) // 2]
        title = f"{quantity.upper()}{', ms' if result.on_gpu else f' / median of {names[0]}'}"
        curves[title] = {name: [value / unit for value in times(name, quantity)] for name in names}
    return curves


def write_replay(result: ReplayResult, folder: Path) -> list[Path]:
    """Write ``replay.json``, ``.md`` and ``.png``; returns the files."""
    written = [folder / f"replay{suffix}" for suffix in (".json", ".md", ".png")]
    save(result, written[0])
    write_whole(written[1], to_markdown(result))
    figures.draw_turns(turn_curves(result), written[2])
    return written
