"""Measure the paper's Table 1 on one card: a whole model of its 30B shape, random weights.

    python -m benchmarks.card.table_1 OUT [--seconds 560] [--slices] [--rehearse] [-- FLAGS]

A *gate* comes first: four layers of the shape answer one prompt. Then servers one after the other,
each with a pattern: stock SGLang with every indexer, ours with 1/4, 1/2 and 1/8, stock again (what
drifted), and the decode of a full KV cache. An arm that does not fit into what is left of the
seconds is skipped and says so. ``OUT/report.json`` has each number as soon as it is known; called
again with the same OUT, what is done is not repeated. What was compiled is packed into
``OUT/caches.tar.xz`` for a next call. ``--slices`` asks slices of a few layers side by side instead
(:mod:`benchmarks.card.slices`). ``--rehearse`` takes a small model and short prompts; FLAGS are
given to every server, behind ours.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from benchmarks.card import phases
from benchmarks.card.servers import HeldServer, keep_caches, lineup, pack_caches
from benchmarks.card.shapes import CARD, REHEARSAL, Scale, write_config
from benchmarks.kernels.machine import clocks
from benchmarks.records import RESULTS
from sglang_indexcache.errors import IndexCacheError
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.lab.client.stream import StreamedAnswer, stream
from sglang_indexcache.lab.latency.measure import random_prompts, steady_rate
from sglang_indexcache.library.lengths import format_length
from sglang_indexcache.serving.client_rules import check_obeyed

Work: TypeAlias = Literal["single", "full"]
RECORD = "latency/h100/table_1.json"
GATE, GATE_LAYERS, GATE_PATTERN, GATE_GUESS = "gate", 4, "FSFS", 90.0
SHORTEST = 3
"""Requests of the shortest length; the others are asked once."""
PAGE = 64
RESERVED = 2 * PAGE
"""Slots beside a prompt's: SGLang keeps some for each request's next tokens."""
FAKE_HOST = "2.2.2.2"
"""Host by which SGLang knows a request without a transfer; without one the server ends."""
PACKING_SECONDS = 15.0
GATE_FAILED = (
    "four layers answer in no way, so nothing was timed; servers.txt has the logs. Try other flags "
    "behind --, as in: -- --moe-runner-backend deep_gemm"
)


@dataclass(frozen=True)
class Arm:
    """One server and what it is asked.

    Attributes:
        name: of its step in the report.
        retention: of :attr:`Scale.patterns`; "" is stock SGLang with every indexer.
        guess: seconds that it takes on an H100, start included, as long as no record says more.
        work: one request at a time, or the decode of a full KV cache.
        longest: asks only so many of the longest lengths, once each; 0 for all.
    """

    name: str
    retention: str
    guess: float
    work: Work = "single"
    longest: int = 0


ARMS = (
    Arm("stock, all F", "", 95),
    Arm("ours, 1/4", "1/4", 60),
    Arm("ours, 1/2", "1/2", 65),
    Arm("ours, 1/8", "1/8", 55),
    Arm("stock again", "", 60, longest=2),
    Arm("full cache, all F", "", 60, "full"),
    Arm("full cache, 1/4", "1/4", 55, "full"),
)
"""The headline, 1/4 over all F, stands after the first two."""


@dataclass
class Evidence:
    """Evidence of one arm so far, in the report after each request."""

    report: phases.Report
    name: str
    content: dict[str, Any] = field(default_factory=dict)

    def add(self, **values: Any) -> None:
        """Write down more of it."""
        self.content |= values
        self.report.note(self.name, self.content)

    def sample(self, **values: Any) -> None:
        """Write down what a request gave."""
        self.add(samples=[*self.content.get("samples", ()), values])


def arguments(
    scale: Scale, config: Path, pattern: str, work: Work, more: Sequence[str]
) -> list[str]:
    """Return a server's command line.

    Args:
        pattern: value of ``--indexcache-pattern``; "" for stock SGLang.
        more: flags behind ours.
    """
    backend = ["--attention-backend", "dsa"]
    if pattern:
        backend = ["--attention-backend", "indexcache", "--indexcache-pattern", pattern]
    sizes = ("--max-total-tokens", str(scale.pool), "--max-running-requests", "8")
    graphs = ["1", "2", "4"]
    if work == "full":
        counts = sorted({room(scale, length) for length in scale.lengths})
        sizes = ("--max-total-tokens", str(scale.full_pool))
        sizes += ("--max-running-requests", str(counts[-1]))
        sizes += ("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "fake")
        sizes += ("--num-reserved-decode-tokens", str(PAGE))
        graphs = [str(count) for count in counts]
    graph = ("--cuda-graph-bs-decode", *graphs)
    return ["--model-path", str(config), *backend, *scale.flags, *sizes, *graph, *more]


def room(scale: Scale, length: int) -> int:
    """Count the requests that the full KV cache holds."""
    pages = -(-(length + scale.new_tokens) // PAGE)
    return int(scale.full_pool // (pages * PAGE + RESERVED))


class FakeTransfer(Client):
    """Client of a server that decodes alone: what it is sent counts as prefilled elsewhere."""

    def stream(self, **body: Any) -> Iterator[dict[str, Any]]:
        """See :meth:`Client.stream`."""
        return super().stream(**body, bootstrap_host=FAKE_HOST, bootstrap_port=0, bootstrap_room=0)


class Run:
    """One call: what is served, where it is reported, and until when.

    Attributes:
        more: flags of every server, behind ours.
        products: flags for FP8 products, those with which the gate passed.
        first: the first arm's server if it imports already; else nothing.
    """

    def __init__(
        self, report: phases.Report, scale: Scale, scratch: Path, ends: float, more: Sequence[str]
    ) -> None:
        self.report, self.scale, self.scratch = report, scale, scratch
        self.ends, self.more = ends, tuple(more)
        self.products, self.first = scale.products[0], list[HeldServer]()

    def server(
        self, name: str, arm: Arm, layers: int, pattern: str, products: Sequence[str]
    ) -> HeldServer:
        """Make an arm's server with flags for FP8 products; it is not started."""
        folder = self.scratch / re.sub(r"\W+", "-", f"{name} {' '.join(products)}")
        config = write_config(folder / "model", self.scale.model, layers)
        line = arguments(self.scale, config, pattern, arm.work, (*products, *self.more))
        return HeldServer(line, folder, fills=arm.work == "full")

    def arm_servers(self, arms: Sequence[Arm], products: Sequence[str]) -> list[HeldServer]:
        """Make the servers of arms; they are not started."""
        layers, patterns = self.scale.model["num_hidden_layers"], self.scale.patterns
        return [
            self.server(arm.name, arm, layers, patterns[arm.retention], products) for arm in arms
        ]

    def gate(self, *, imports_ahead: bool = True) -> bool:
        """See whether four layers answer; keep the first flags for FP8 products that do.

        Meanwhile the first arm's server imports, with the flags that are preferred.
        """
        if self.report.has_passed(GATE):
            self.products = tuple(self.report.content["steps"][GATE]["evidence"]["flags"])
            return True
        evidence, began, gate = Evidence(self.report, GATE), time.monotonic(), Arm(GATE, "", 0)
        problems: list[str] = []
        servers = {
            products: self.server(GATE, gate, GATE_LAYERS, GATE_PATTERN, products)
            for products in self.scale.products
        }
        first = self.arm_servers(self.missing()[:1] if imports_ahead else (), self.products)
        try:
            for server in (*servers.values(), *first):  # side by side: each of the gate is small
                server.start()
            phases.run_stage(phases.engine_kernels(), self.report, self.scratch, self.ends)
            for server in servers.values():
                server.begin()
            for products, server in servers.items():
                try:
                    self._ask_gate(server, evidence)
                except IndexCacheError as error:
                    problems += causes(error, server.log_tail())
                    continue
                self.first = first if products == self.products else []
                self.products = products
                evidence.add(flags=list(products), problems=problems)
                words = f"four layers answer with {' '.join(products) or 'the default products'}"
                self.finish(GATE, 0, began, words, evidence)
                return True
        finally:
            for server in (*servers.values(), *(s for s in first if s not in self.first)):
                server.stop(grace=0)
                self.report.keep_logs(GATE, server.folder)
        evidence.add(problems=problems)
        words = [*problems, GATE_FAILED]
        self.finish(GATE, 1, began, words, evidence)
        return False

    def _ask_gate(self, server: HeldServer, evidence: Evidence) -> None:
        client = self.ready(server, evidence)
        with server.watched():
            self.ask(client, self.scale.lengths[0], 1, "gate")
        evidence.add(seen=server.seen(), pattern=served_pattern(client))

    def skips(self, name: str, guess: float) -> bool:
        """Return whether a step does not fit into what is left; then the report says so."""
        seconds, source = self.expects(name, guess)
        if (left := self.ends - time.monotonic()) >= seconds:
            return False
        words = f"it takes {seconds:.0f} s ({source}), and {max(left, 0):.0f} were left"
        self.report.add(name, {"code": phases.SKIPPED, "seconds": 0, "said": words})
        return True

    def expects(self, name: str, guess: float) -> tuple[float, str]:
        """Return the seconds that a step takes, and whether they are recorded or a guess."""
        path = RESULTS / RECORD
        record = json.loads(path.read_text()) if path.exists() else {"steps": {}}
        step = record["steps"].get(name, {"code": None})
        is_same_card = record.get("machine", {}).get("name") == self.report.machine["name"]
        if is_same_card and step["code"] == 0:
            return float(step["seconds"]), "recorded"
        return guess, "a guess"

    def schedule(self) -> Iterator[str]:
        """Yield when each missing arm is to be done, in lines."""
        passed = self.report.has_passed(GATE)
        steps = [] if passed else [(GATE, GATE_GUESS)]
        end = 0.0
        for name, guess in [*steps, *((arm.name, arm.guess) for arm in self.missing())]:
            seconds, source = self.expects(name, guess)
            end += seconds
            yield f"by second {end:.0f}: {name} ({seconds:.0f} s, {source})"

    def ready(self, server: HeldServer, evidence: Evidence) -> Client:
        """Wait for a server that was begun."""
        left = max(5.0, min(self.scale.start_seconds, self.ends - time.monotonic()))
        url = server.wait_until_ready(left).url
        now = time.monotonic()
        evidence.add(start_seconds=round(now - server.begun, 1))
        return Client(url, timeout=max(5.0, self.ends - now))

    def ask(self, client: Client, length: int, count: int, *seed: object) -> list[StreamedAnswer]:
        """Send prompts that no other request had; every arm gets the same ones."""
        shapes = (self.scale.model, self.scale.glm_5)  # a rank of GLM-5 has fewer
        vocabulary = min(shape["vocab_size"] for shape in shapes)
        prompts = random_prompts(count, length, vocabulary, "table 1", length, *seed)
        return stream(client, prompts, self.scale.new_tokens)

    def missing(self) -> list[Arm]:
        """Return the arms that were not measured yet, in order."""
        return [arm for arm in ARMS if not self.report.has_passed(arm.name)]

    def table(self) -> None:
        """Measure every arm that has not been, in order."""
        arms = self.missing()
        servers = [*self.first, *self.arm_servers(arms[len(self.first) :], self.products)]
        with lineup(servers) as turns:
            for arm, server in zip(arms, turns, strict=True):
                self._arm(arm, server)

    def _arm(self, arm: Arm, server: HeldServer) -> None:
        began = time.monotonic()
        if self.skips(arm.name, arm.guess):
            return
        evidence = Evidence(self.report, arm.name)
        try:
            client = self.ready(server, evidence)
            evidence.add(clocks=[clocks()])
            measure = self._full if arm.work == "full" else self._single
            measure(arm, server, client, evidence)
            evidence.add(clocks=[*evidence.content["clocks"], clocks()])
            self.finish(arm.name, 0, began, line_of(evidence.content["samples"]), evidence)
        except IndexCacheError as error:
            self.finish(arm.name, 1, began, causes(error, server.log_tail()), evidence)
        self.report.keep_logs(arm.name, server.folder)

    def _single(self, arm: Arm, server: HeldServer, client: Client, evidence: Evidence) -> None:
        lengths = self.scale.lengths[-arm.longest :]
        self.ask(client, lengths[0], 1, "warm-up")
        before = None if not arm.retention else client.states()
        for length in lengths:
            for number in range(SHORTEST if length == self.scale.lengths[0] else 1):
                (answer,) = self.ask(client, length, 1, number)
                first, rate = answer.first_token, answer.decode_rate
                evidence.sample(length=length, prefill=round(first, 4), decode=round(rate, 2))
        if before is not None:
            after, pattern = client.states(), served_pattern(client)
            check_obeyed(before, after, [pattern], client.name, alone=True)
            evidence.add(pattern=pattern)
        elif not arm.longest:
            self._watch(server, client, evidence)

    def _watch(self, server: HeldServer, client: Client, evidence: Evidence) -> None:
        """Time the indexers of one more prefill: which share of a prefill they take."""
        if self.ends - time.monotonic() < 30:
            return
        with server.watched():
            self.ask(client, self.scale.watched, 1, "watched")
        evidence.add(seen={**server.seen(), "length": self.scale.watched})

    def _full(self, arm: Arm, server: HeldServer, client: Client, evidence: Evidence) -> None:
        """Time the decode of as many requests as the KV cache holds, that nobody prefilled."""
        client = FakeTransfer(client.url, timeout=max(5.0, self.ends - time.monotonic()))
        self.ask(client, self.scale.lengths[-1], 1, "warm-up")
        for length in reversed(self.scale.lengths):
            count = room(self.scale, length)
            answers = self.ask(client, length, count, "full")
            rate, _ = steady_rate(answers)
            evidence.sample(length=length, full=round(rate, 1), requests=count)
        if arm.retention:
            evidence.add(pattern=served_pattern(client))

    def finish(self, name: str, code: int, began: float, words: Any, evidence: Evidence) -> None:
        """Report what came of a step that began at a time."""
        seconds = round(time.monotonic() - began, 1)
        outcome = {"code": code, "seconds": seconds, "said": words, "evidence": evidence.content}
        self.report.add(name, outcome)


def causes(error: IndexCacheError, log: str) -> list[str]:
    """Return why a server did not answer: what the client saw, and the last error in a log."""
    return [str(error).partition("\n")[0][:300], *phases.last(log)]


def served_pattern(client: Client) -> str:
    """Return the pattern of a server of ours, in letters."""
    (state, *_) = client.states()
    return str(state.pattern)


def line_of(samples: Sequence[dict[str, Any]]) -> str:
    """Return an arm's samples in a line."""
    return "; ".join(_words(sample) for sample in samples)


def _words(sample: dict[str, Any]) -> str:
    length = format_length(sample["length"])
    if "full" in sample:
        return f"{length} x {sample['requests']}: {sample['full']:g} tok/s"
    return f"{length}: {sample['prefill']:g} s, {sample['decode']:g} tok/s"


def check_same(report: phases.Report, **asked: Any) -> None:
    """End the program if OUT holds what another card, commit, scale or other flags gave."""
    asked |= {key: report.machine.get(key) for key in ("name", "commit")}
    before = report.content.setdefault("asked", asked)
    differing = sorted(key for key in asked if before.get(key) != asked[key])
    if differing:
        raise SystemExit(
            f"error: {report.path} was measured with another {', '.join(differing)}, and one table "
            "holds one card's numbers. Give another folder."
        )


def main() -> int:
    """Measure. Return 1 if a step failed; a step that did not fit into the time is no failure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=560.0, help="for all of it")
    parser.add_argument("--slices", action="store_true", help="slices of a few layers, in turns")
    parser.add_argument("--rehearse", action="store_true", help="a small model, short prompts")
    words = sys.argv[1:]
    place = words.index("--") if "--" in words else len(words)
    options, more = parser.parse_args(words[:place]), words[place + 1 :]
    from benchmarks.card import slices  # which takes what is above

    ends = time.monotonic() + options.seconds
    phases.prepare()
    report = phases.Report(options.out)
    check_same(report, rehearse=options.rehearse, flags=more)
    machine = report.content["machine"]
    print(keep_caches(machine), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        scale = REHEARSAL if options.rehearse else CARD
        run = Run(report, scale, Path(scratch), ends - PACKING_SECONDS, more)
        print("\n".join(() if options.slices else run.schedule()), flush=True)
        if run.gate(imports_ahead=not options.slices):
            slices.measure(run) if options.slices else run.table()
    print(pack_caches(machine, options.out / "caches.tar.xz"), flush=True)
    print(report.summary())
    return report.exit_code()


if __name__ == "__main__":
    sys.exit(main())
