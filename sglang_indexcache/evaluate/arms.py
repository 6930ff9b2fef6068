"""How the arms of an evaluation are served.

* One server in live mode: every request names its pattern, and all arms share the batches.
* A server for each arm, in static mode.

Who is asked is made sure of before a context and checked after it, before it counts.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from sglang_indexcache.ask.protocol import RankState, alike, check_obeyed
from sglang_indexcache.ask.protocol import facts as facts_of
from sglang_indexcache.ask.score import Engine
from sglang_indexcache.errors import QualityError, ServerError, ServerUnavailableError
from sglang_indexcache.evaluate.cost import PAGE
from sglang_indexcache.evaluate.evaluation import Arm
from sglang_indexcache.evaluate.scoring import ArmRequest, Scored, score
from sglang_indexcache.evaluate.tasks import Context


class ArmServer(Engine, Protocol):
    """What arms need of a server: ``client.Client``."""

    def server_info(self) -> dict[str, Any]:
        """SGLang's ``/server_info``."""

    def is_ready(self) -> bool:
        """Whether the server answers requests."""


class Arms(Protocol):
    """Asks arms, and checks that each answered as itself."""

    @property
    def servers(self) -> Sequence[ArmServer]:
        """All of them."""

    def together(self, requests: Sequence[ArmRequest]) -> list[list[ArmRequest]]:
        """Which arms are asked in the same batch, in which order."""

    def ask(self, context: Context, requests: Sequence[ArmRequest]) -> list[Scored]:
        """The answers of each arm behind a context.

        Raises:
            ServerUnavailableError: try again.
            QualityError: the servers do not do what the arms need.
        """


def make_arms(arms: Sequence[Arm], urls: Mapping[str, ArmServer]) -> Arms:
    """The way in which these servers serve these arms.

    Args:
        arms: all that will be asked.
        urls: one server under the name "" for all arms, or one for each arm's name.

    Raises:
        QualityError: a server is missing, given twice, in the wrong mode, or unlike the others.
    """
    if set(urls) == {""}:
        return InRequests(urls[""])
    without = [arm.name for arm in arms if arm.name not in urls]
    if without:
        raise QualityError(
            f"no server is given for {', '.join(without)}. Give each arm a --url NAME=URL, or one "
            "--url alone for a server in live mode, which serves them all."
        )
    _check_alike(arms, urls)
    return Separate({arm.name: urls[arm.name] for arm in arms})


class _Cache:
    """Knows what a server may have cached of a context: what the same arm asked before."""

    def __init__(self) -> None:
        self._nonce = uuid.uuid4().hex[:8]
        self._asked: dict[str, set[int]] = {}

    def key(self, request: ArmRequest) -> str:
        """Of an arm's cached prefixes; never one of an earlier process or another arm."""
        return f"{self._nonce}/{request.arm.pattern}/{request.repeat}"

    def check(self, key: str, context: Context, cached: int) -> None:
        """Refuse cached tokens that this arm did not compute."""
        known = self._asked.setdefault(key, set())
        marks = _marks(context.ids)
        own = PAGE * next((n for n, mark in enumerate(marks) if mark not in known), len(marks))
        if cached >= own + PAGE:  # a page of the server's cache may be smaller
            raise QualityError(
                f"the server took {cached:,} tokens of {context.name} from its cache, where "
                f"another arm left them, and only {own:,} were this arm's own: it shares cached "
                "prefixes between patterns. Use an SGLang that keeps extra_key apart, start it "
                "with --disable-radix-cache, or take a server for each arm."
            )
        # All of them: a user's prompts may begin alike, or one be the continuation of another,
        # behind the answer that this one was asked with.
        known.update(marks)
        rest, last = context.ids[PAGE * len(marks) :], marks[-1] if marks else 0
        for question in context.questions:
            known.update(_marks(rest + question.ids + question.answer, last))


def _marks(ids: list[int], mark: int = 0) -> list[int]:
    """A hash of each prefix of whole pages, after the prefix that ``mark`` stands for."""
    found = []
    for start in range(0, len(ids) - PAGE + 1, PAGE):
        mark = hash((mark, *ids[start : start + PAGE]))
        found.append(mark)
    return found


class InRequests:
    """One server whose requests name their patterns: every arm in the same batch.

    Raises:
        QualityError: the server is not in live mode.
        ServerError: it does not run IndexCache.
    """

    def __init__(self, server: ArmServer) -> None:
        self._server, self._cache = server, _Cache()
        self._live()

    @property
    def servers(self) -> Sequence[ArmServer]:
        """The one."""
        return [self._server]

    def together(self, requests: Sequence[ArmRequest]) -> list[list[ArmRequest]]:
        """All at once; the reference's second asking apart, so that it is in another batch."""
        first = [one for one in requests if not one.repeat]
        return [part for part in (first, [one for one in requests if one.repeat]) if part]

    def ask(self, context: Context, requests: Sequence[ArmRequest]) -> list[Scored]:
        """See :class:`Arms`."""
        before = self._live()
        asked = [
            replace(one, key=self._cache.key(one), pattern=one.arm.pattern) for one in requests
        ]
        try:
            found = score(self._server, context, asked)
            patterns = [one.pattern for one in asked]
            check_obeyed(before, self._server.states(), patterns, self._server.name)
        except ServerUnavailableError:
            self._cache = _Cache()  # it may have cached what it did not answer
            raise
        for one, scored in zip(asked, found, strict=True):
            self._cache.check(one.key, context, scored.cached)
        return found

    def _live(self) -> list[RankState]:
        states = self._server.states()
        if any(state.mode != "live" for state in states):
            raise QualityError(
                f"{self._server.name} does not run in live mode, so it serves one pattern alone. "
                "Start it with --indexcache-mode live, or start one server for each arm and give "
                "each as --url NAME=URL."
            )
        return states


class Separate:
    """A server for each arm, in static mode."""

    def __init__(self, servers: Mapping[str, ArmServer]) -> None:
        self._by_arm = dict(servers)
        self._caches = {name: _Cache() for name in servers}

    @property
    def servers(self) -> Sequence[ArmServer]:
        """One for each arm, in their order."""
        return list(self._by_arm.values())

    def together(self, requests: Sequence[ArmRequest]) -> list[list[ArmRequest]]:
        """One after the other."""
        return [[one] for one in requests]

    def ask(self, context: Context, requests: Sequence[ArmRequest]) -> list[Scored]:
        """See :class:`Arms`."""
        [one] = requests
        server, cache = self._by_arm[one.arm.name], self._caches[one.arm.name]
        asked = replace(one, key=cache.key(one), pattern=one.arm.pattern)
        before = _states_of(server, one.arm)
        try:
            found = score(server, context, [asked])
            check_obeyed(before, _states_of(server, one.arm), [one.arm.pattern], server.name)
        except ServerUnavailableError:
            self._caches[one.arm.name] = _Cache()  # it may have cached what it did not answer
            raise
        cache.check(asked.key, context, found[0].cached)
        return found


def longest_prompt(server: ArmServer) -> int | None:
    """Tokens of the longest prompt that a server takes; None if it does not say."""
    found = server.server_info().get("max_req_input_len")
    return None if found is None else int(found)


def facts(server: ArmServer) -> dict[str, Any]:
    """What a server says of itself that may not change, by SGLang's names.

    Raises:
        QualityError: it is no SGLang server.
    """
    try:
        info = server.server_info()
    except ServerUnavailableError:
        raise
    except ServerError as error:
        raise QualityError(
            f"{server.name} is no SGLang server: it has no /server_info. Run another engine with a "
            "harness of its own, and give its logs to `indexcache eval compare`."
        ) from error
    return facts_of(info, server.name)


def _check_alike(arms: Sequence[Arm], urls: Mapping[str, ArmServer]) -> None:
    """Servers may differ in the pattern alone, and each must run its own."""
    found = {arm.name: facts(urls[arm.name]) for arm in arms}
    (first, known), *others = found.items()
    for name, other in others:
        differing = [
            f"{fact} ({' and '.join(repr(value) for value in said)})"
            for fact, said in alike({first: known, name: other}).items()
        ]
        if differing:
            raise QualityError(
                f"the servers of {first} and {name} differ in more than the pattern: "
                f"{'; '.join(differing)}. Start both with the same checkpoint and the same flags "
                "but --indexcache-pattern."
            )
    for arm in arms:
        _states_of(urls[arm.name], arm)


def _states_of(server: ArmServer, arm: Arm) -> list[RankState]:
    """The states of a server that must run the arm's pattern."""
    states = server.states()
    for state in states:
        if state.pattern != arm.pattern:
            raise QualityError(
                f"{server.name} is given for {arm.name}, which is {arm.pattern}, and runs "
                f"{state.pattern}. Start it with --indexcache-pattern {arm.pattern}."
            )
    return states
