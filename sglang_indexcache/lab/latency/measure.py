"""The paper's latency table (Table 1) on real servers.

Configurations take turns, A B A B, so that a drift of the machine affects all of them alike, and a
speed-up is the ratio of two neighbours. In a visit every length is measured by

* one request per data-parallel rank ("single request on each GPU"): TTFT and decode rate, then
* as many requests as the KV cache holds: tokens per second while all of them decode.

A visit is a server start with all of these measurements. For servers that run already, a visit is a
single measurement: arms alternate request by request, even if one server in live mode stands for
all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Literal

from sglang_indexcache.checkpoint import Checkpoint, read_config, text_config
from sglang_indexcache.errors import BenchError, CheckpointError
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.lab.client.stream import StreamedAnswer, stream
from sglang_indexcache.lab.latency import tables
from sglang_indexcache.lab.latency.results import (
    Configuration,
    Environment,
    LatencyResult,
    LatencySample,
    Metric,
    Model,
    ServerFacts,
    Visit,
)
from sglang_indexcache.lab.latency.servers import (
    Servers,
    check_served,
    indexer_seconds,
    server_facts,
)
from sglang_indexcache.lab.runs.journal import Journal
from sglang_indexcache.lab.runs.provenance import busy_cores, machine
from sglang_indexcache.library.digest import checkpoint_digest
from sglang_indexcache.library.files import Strict
from sglang_indexcache.library.lengths import counted, format_length
from sglang_indexcache.library.writing import write_whole
from sglang_indexcache.serving.client_rules import check_obeyed

_WARM_UP_TOKENS = 4
_SPARE_TOKENS = 8
"""Number of tokens to leave free, because SGLang keeps a few slots of the pool to itself."""

_SPECIAL_TOKENS = 10
"""First ordinary token id: smaller ids are often special tokens."""
_UNUSED_SHARE = 0.1
"""Share of ids at the vocabulary's end that are often special too."""

Report = Callable[[str], None]
ROUNDS = "rounds.jsonl"
"""The journal beside the results."""
_OF_ONE_TIME: Any = {"environment": {"date", "load_before"}, "visits": True, "samples": True}
"""Fields of a result that differ when the same command is run again."""
Step = tuple[int, Literal["single", "full"]]
"""Prompt tokens, and what is sent at once: one request per rank, or as many as the KV cache
holds."""
IndexerTime = tuple[float | None, float | None]
"""Seconds in prefill and in decode; None if the server does not count them."""


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement.

    Attributes:
        lengths: numbers of prompt tokens.
        watch_seconds: seconds to watch for foreign work before each visit.
    """

    lengths: tuple[int, ...]
    rounds: int = 3
    new_tokens: int = 64
    watch_seconds: float = 2.0

    @property
    def steps(self) -> list[Step]:
        """Steps of a round, in order."""
        return [(length, kind) for length in self.lengths for kind in ("single", "full")]

    def check(self) -> None:
        """Raise BenchError for settings that give no result."""
        if not self.lengths or min(self.lengths) < 1 or self.rounds < 1:
            raise BenchError("give at least one length and one round")
        if len(set(self.lengths)) != len(self.lengths):
            raise BenchError("the same length was given twice")
        if self.new_tokens < 2:
            raise BenchError("a decode rate needs --new-tokens of at least 2")


@dataclass(frozen=True)
class TargetModel:
    """Description of the model from its folder."""

    checkpoint: Checkpoint
    model: Model
    vocab_size: int


def read_target(folder: Path) -> TargetModel:
    """Read a checkpoint folder; the weights may be missing.

    Raises:
        CheckpointError: there is no config.json of a DSA model, or it has no vocab_size.
    """
    config = read_config(folder)
    checkpoint = Checkpoint.from_config(config, str(folder))
    try:
        digest = checkpoint_digest(folder)
    except CheckpointError:  # a config without weights is enough to describe a model
        digest = ""
    shape = {name: value for name, value in checkpoint.shape.items() if isinstance(value, int)}
    shape.setdefault("num_hidden_layers", checkpoint.num_layers)
    model = Model(
        name=folder.resolve().name,
        architecture=checkpoint.architecture,
        digest=digest,
        shape=shape,
    )
    text = text_config(config)
    if text.get("vocab_size") is None:
        raise CheckpointError(
            f"{folder / 'config.json'} has no vocab_size, which a DSA model's config has"
        )
    return TargetModel(checkpoint, model, int(text["vocab_size"]))


def run(
    target: TargetModel,
    servers: Servers,
    served: Sequence[Configuration],
    settings: Settings,
    output: Path,
    *,
    arguments: Sequence[str] = (),
    report: Report = lambda _: None,
) -> LatencyResult:
    """Measure everything; return a result only if no server did anything wrong.

    The first of ``served`` is the baseline; ``arguments`` are the servers' flags, for the record.
    Every complete round is kept in the folder ``output``, so that an interrupted run continues
    after it. An interrupted round is measured again, because its two halves would be far apart in
    time.

    Raises:
        BenchError: a server did something wrong, or the folder belongs to another run or is in use.
        OutputError: the disk is full; afterwards the same command continues.
    """
    settings.check()
    about = LatencyResult(
        environment=Environment(**machine()),
        side_by_side=not servers.started_here,
        started_here=servers.started_here,
        model=target.model,
        arguments=tuple(arguments),
        configurations=tuple(served),
        lengths=settings.lengths,
        new_tokens=settings.new_tokens,
        rounds=settings.rounds,
        visits=(),
        samples=(),
    )
    measured = _Measurement(target, servers, served, settings, report)
    identity = json.loads(about.model_dump_json(exclude=_OF_ONE_TIME))
    with Journal(output / ROUNDS, identity, "benchmark", BenchError) as journal:
        rounds = list(journal.parsed(_Round.model_validate))
        if rounds:
            report(f"resuming: {counted(len(rounds), 'round')} in {output}")
        for number in range(len(rounds), settings.rounds):
            rounds.append(measured.round(number, about.environment))
            journal.write(rounds[-1].model_dump(mode="json"))
    return about.model_copy(
        update={
            "environment": rounds[0].environment,
            "visits": tuple(visit for record in rounds for visit in record.visits),
            "samples": tuple(sample for record in rounds for sample in record.samples),
        }
    )


class _Round(Strict):
    """One round in its stored form; ``environment`` describes the process that measured it."""

    environment: Environment
    visits: tuple[Visit, ...]
    samples: tuple[LatencySample, ...]


@dataclass
class _Measurement:
    """All rounds on the same servers, each of which is warmed up once."""

    target: TargetModel
    servers: Servers
    served: Sequence[Configuration]
    settings: Settings
    report: Report
    warm: set[str] = field(default_factory=set)

    def round(self, number: int, environment: Environment) -> _Round:
        """Measure every configuration once, in turn."""
        steps = self.settings.steps
        turns = [steps] if self.servers.started_here else [[step] for step in steps]
        visits: list[Visit] = []
        samples: list[LatencySample] = []
        for turn, configuration in product(turns, self.served):
            self.report(f"round {number + 1} of {self.settings.rounds}: {configuration.name}")
            visit, visit_samples = self._visit(number, configuration, turn)
            visits.append(visit)
            samples += visit_samples
        return _Round(environment=environment, visits=tuple(visits), samples=tuple(samples))

    def _visit(
        self, number: int, configuration: Configuration, steps: Sequence[Step]
    ) -> tuple[Visit, list[LatencySample]]:
        foreign = busy_cores(self.settings.watch_seconds)
        with self.servers.visit(configuration) as client:
            check_served(client, configuration, self.target.model)
            facts, name = server_facts(client), configuration.name
            visit = _Visit(client, self.target, self.settings, configuration, number, facts)
            if self.servers.started_here or name not in self.warm:
                visit.warm_up()
                self.warm.add(name)
            samples = []
            for sample in visit.measure(steps):
                samples.append(sample)
                self.report(
                    f"  {format_length(sample.length)} {sample.metric}: {sample.value:.4g} "
                    f"({sample.requests} at once)"
                )
        return Visit(configuration=name, round=number, facts=facts, busy_cores=foreign), samples


@dataclass(frozen=True)
class _Visit:
    """All measurements on one server."""

    client: Client
    target: TargetModel
    settings: Settings
    configuration: Configuration
    round: int
    server: ServerFacts

    def measure(self, steps: Sequence[Step]) -> Iterator[LatencySample]:
        """Measure some steps, then check that the pattern was obeyed."""
        remaining = [(n, kind) for n, kind in steps if kind == "single" or not self._one_fills(n)]
        if not remaining:
            return
        before = self.client.states()
        for length, kind in remaining:
            if kind == "single":
                yield from self._single(length)
            else:
                yield self._full(length)
        check_served(self.client, self.configuration, self.target.model)
        after, pattern = self.client.states(), self.configuration.pattern
        check_obeyed(before, after, [pattern], self.client.name, alone=True)

    def concurrency(self, length: int) -> int:
        """Count the requests that the KV caches of all ranks hold at once."""
        page = self.server.page
        pages = -(-(length + self.settings.new_tokens) // page)
        return (self.server.capacity - _SPARE_TOKENS) // (pages * page) * self.server.dp

    def _one_fills(self, length: int) -> bool:
        """Return whether one request fills a rank's cache, which is then measured already."""
        return self.concurrency(length) == self.server.dp

    def warm_up(self) -> None:
        """Run each shape of batch once, so that one-time costs are not measured.

        Raises:
            BenchError: a length does not fit the KV cache.
        """
        for length in self.settings.lengths:
            if not self.concurrency(length):
                raise BenchError(
                    f"the KV cache holds {self.server.capacity} tokens a rank, too few for a "
                    f"prompt of {length} and {self.settings.new_tokens} new tokens. Give the "
                    "servers more --max-total-tokens or leave the length out."
                )
        chunk = self.server.chunked_prefill
        longest = 2 * chunk if chunk > 0 else max(self.settings.lengths)
        for length in sorted({min(length, longest) for length in self.settings.lengths}):
            self._send(length, self.server.dp, _WARM_UP_TOKENS, "warm-up")
        for count in sorted({self.concurrency(length) for length in self.settings.lengths}):
            self._send(self.server.page, count, _WARM_UP_TOKENS, "warm-up")

    def _send(
        self, length: int, count: int, new_tokens: int, *seed: object
    ) -> list[StreamedAnswer]:
        prompts = random_prompts(count, length, self.target.vocab_size, self.round, length, *seed)
        self.client.flush_cache()
        pattern = self.configuration.pattern if self.server.mode == "live" else None
        return stream(self.client, prompts, new_tokens, pattern=pattern)

    def _timed(
        self, length: int, count: int, *seed: object
    ) -> tuple[list[StreamedAnswer], IndexerTime]:
        """Send a batch; return its answers, and the seconds that indexers took for them."""
        before = indexer_seconds(self.client)
        answers = self._send(length, count, self.settings.new_tokens, *seed)
        after = indexer_seconds(self.client)
        if not any(after):
            return answers, (None, None)
        return answers, (after[0] - before[0], after[1] - before[1])

    def _single(self, length: int) -> Iterator[LatencySample]:
        """Send one request per rank, and yield its TTFT and decode rate."""
        count = self.server.dp
        answers, (prefill, decode) = self._timed(length, count, "single")
        first = median(answer.first_token for answer in answers)
        yield self._sample(length, "prefill", first, count, _share(prefill, first))
        rate = median(answer.decode_rate for answer in answers)
        share = _share(decode, median(a.last_token - a.first_token for a in answers))
        yield self._sample(length, "decode", rate, count, share)
        if self._one_fills(length):
            yield self._sample(length, "full", rate, count, share)

    def _full(self, length: int) -> LatencySample:
        """Run as many requests as fit, and measure the rate of a rank while all of them decode."""
        count = self.concurrency(length)
        answers, (_, decode) = self._timed(length, count, "full")
        rate, start = steady_rate(answers)
        # SGLang prefills first, so all but a few decode steps come after the steady state's start.
        decoding = max(answer.last_token for answer in answers) - start
        rate /= self.server.dp
        return self._sample(length, "full", rate, count, _share(decode, decoding))

    def _sample(
        self, length: int, metric: Metric, value: float, requests: int, share: float | None
    ) -> LatencySample:
        return LatencySample(
            configuration=self.configuration.name,
            round=self.round,
            length=length,
            metric=metric,
            value=value,
            requests=requests,
            indexer_share=share,
        )


def _share(part: float | None, total: float) -> float | None:
    """Return the part's share of the total; None if unknown, or if the part took longer.

    The server reports the part, and the client measures the total. If tokens arrive late, a few
    short steps can seem to take less time than their indexers did, so that no share is known.
    """
    return None if part is None or part > total else part / total


def steady_rate(answers: Sequence[StreamedAnswer]) -> tuple[float, float]:
    """Measure a batch's steady state: from the last one's first token to the first one's last.

    The definition is that of SGLang's ``benchmark/stream_metrics.py``.

    Returns:
        Tokens per second of all requests together, and the steady state's start in seconds since
            they were sent.

    Raises:
        BenchError: a request ended before another began.
    """
    start = max(answer.first_token for answer in answers)
    end = min(answer.last_token for answer in answers)
    if end <= start:
        raise BenchError(
            f"{len(answers)} requests never decoded all at once: one ended before another had its "
            "first token. Ask for more --new-tokens, or give the servers fewer --max-total-tokens."
        )
    tokens = sum(_tokens_at(answer, end) - _tokens_at(answer, start) for answer in answers)
    return tokens / (end - start), start


def _tokens_at(answer: StreamedAnswer, when: float) -> float:
    """Count the tokens generated at ``when``, interpolated between two chunks."""
    before = (0.0, 0)
    for time, tokens in answer.arrivals:
        if time >= when:
            share = (when - before[0]) / (time - before[0]) if time > before[0] else 1.0
            return before[1] + share * (tokens - before[1])
        before = (time, tokens)
    return float(before[1])


def random_prompts(count: int, length: int, vocab_size: int, *seed: object) -> list[list[int]]:
    """Draw ``count`` prompts of ``length`` random token ids; the same seed gives the same prompts.

    Prompts are sent as ids, so that no tokenizer can change their length. They differ from the
    first token on, so that no two of them share a cache page.

    Raises:
        BenchError: there are no tokens to draw, or more prompts than first tokens.
    """
    words = range(_SPECIAL_TOKENS, int(vocab_size * (1 - _UNUSED_SHARE)))
    if length < 1 or count > len(words):
        raise BenchError(f"cannot make {count} different prompts of {length} tokens")
    source = Random("/".join(map(str, seed)))
    firsts = source.sample(words, count)
    return [[first, *source.choices(words, k=length - 1)] for first in firsts]


def write_latency(result: LatencyResult, folder: Path, figures: str = "png") -> list[Path]:
    """Write ``latency.json``, ``.md`` and a figure in the format ``figures``; return the files."""
    names = ("latency.json", "latency.md", f"latency-speedup.{figures}")
    paths = [folder / name for name in names]
    write_whole(paths[0], result.model_dump_json(indent=1) + "\n")
    write_whole(paths[1], tables.report(result))
    tables.draw_speedups(result, paths[2])
    return paths
