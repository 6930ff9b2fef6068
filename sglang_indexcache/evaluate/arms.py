"""How the arms of an evaluation are served.

* Patterns that belong to requests: one server in live mode, and all arms in the same batch.
* A server for each arm, in static mode, or of any engine; then nothing but the URL says what runs.

Who is asked is made sure before a context and checked behind it, before it counts.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_indexcache.ask.protocol import RankState, alike, check_obeyed
from sglang_indexcache.ask.protocol import facts as protocol_facts
from sglang_indexcache.errors import QualityError, ServerError, ServerUnavailableError
from sglang_indexcache.evaluate.evaluation import Arm
from sglang_indexcache.evaluate.plan import PAGE
from sglang_indexcache.evaluate.scoring import Engine, Voice
from sglang_indexcache.evaluate.tasks import Context


class Server(Engine, Protocol):
    """What arms need of a server: ``client.Client``."""

    def states(self) -> list[RankState]:
        """What IndexCache reports, one entry per data-parallel rank."""

    def server_info(self) -> dict[str, Any]:
        """SGLang's ``/server_info``."""

    def switch_pattern(self, value: str) -> list[RankState]:
        """Make ``value`` the pattern on every rank; returns the new states."""

    def flush_cache(self, timeout: float = 60.0) -> None:
        """Empty the radix cache."""

    def is_ready(self) -> bool:
        """Whether the server answers requests."""


@dataclass(frozen=True)
class Turn:
    """An arm that is asked; the reference again, for A/A, has ``repeat`` 1."""

    arm: Arm
    repeat: int = 0


Ask = Callable[[Engine, Context, Sequence[Voice]], list[Any]]
"""``scoring.score``, or another way to have answers."""


class Arms(Protocol):
    """Serves turns.

    Attributes:
        block: contexts to ask together.
        verified: whether the servers themselves say which pattern they run.
        servers: all of them.
    """

    block: int
    verified: bool

    @property
    def servers(self) -> Sequence[Server]:
        """All of them."""

    def together(self, turns: Sequence[Turn]) -> list[list[Turn]]:
        """Which turns are asked in the same batch, in which order."""

    def ask(self, ask: Ask, context: Context, turns: Sequence[Turn]) -> list[Any]:
        """What ``ask`` gets for each of the turns.

        Raises:
            ServerUnavailableError: try again; the servers are then made sure of anew.
            QualityError: the servers do not do what the arms need.
        """


def make_arms(arms: Sequence[Arm], urls: Mapping[str, Server]) -> Arms:
    """The best way in which these servers can serve these arms.

    Args:
        arms: all that will be asked.
        urls: one server under the name "" for all arms, or one for each arm's name.

    Raises:
        QualityError: a server is missing, given twice, in the wrong mode, or unlike the others.
    """
    if set(urls) == {""}:
        server = urls[""]
        states = server.states()
        if not states:
            raise QualityError(
                f"{server.url} does not say which pattern it runs and cannot be told to change it. "
                "Start a server for each arm and give each as --url NAME=URL."
            )
        if any(state.mode != "live" for state in states):
            raise QualityError(
                f"{server.url} runs in static mode, where it can serve one pattern alone. Start it "
                "with --indexcache-mode live, or start one server for each arm and give each as "
                "--url NAME=URL."
            )
        return InRequests(server)
    without = [arm.name for arm in arms if arm.name not in urls]
    if without:
        raise QualityError(
            f"no server is given for {', '.join(without)}. Give each arm a --url NAME=URL, or one "
            "--url alone for a server in live mode, which serves them all."
        )
    _check_alike(arms, urls)
    _check_apart(arms, urls)
    return Separate({arm.name: urls[arm.name] for arm in arms})


class _Cache:
    """Knows what a server may have cached of a context: what the same voice asked before."""

    def __init__(self) -> None:
        self._nonce = uuid.uuid4().hex[:8]
        self._asked: dict[str, set[int]] = {}

    def key(self, turn: Turn) -> str:
        """Of a turn's cached prefixes; never one of an earlier process or another arm."""
        return f"{self._nonce}/{turn.arm.pattern or turn.arm.name}/{turn.repeat}"

    def check(self, key: str, context: Context, cached: int) -> None:
        """Refuse cached tokens that this voice did not compute."""
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
    """What stands for each beginning of whole pages, behind those that ``mark`` stands for."""
    found = []
    for start in range(0, len(ids) - PAGE + 1, PAGE):
        mark = hash((mark, *ids[start : start + PAGE]))
        found.append(mark)
    return found


class InRequests:
    """One server whose requests name their patterns: every arm in the same batch."""

    block = 1
    verified = True

    def __init__(self, server: Server) -> None:
        self._server, self._cache = server, _Cache()

    @property
    def servers(self) -> Sequence[Server]:
        """The one."""
        return [self._server]

    def together(self, turns: Sequence[Turn]) -> list[list[Turn]]:
        """All at once; the reference's second asking apart, so that it is in another batch."""
        first = [turn for turn in turns if not turn.repeat]
        return [part for part in (first, [turn for turn in turns if turn.repeat]) if part]

    def ask(self, ask: Ask, context: Context, turns: Sequence[Turn]) -> list[Any]:
        """See :class:`Arms`."""
        before = self._server.states()
        if any(state.mode != "live" for state in before):
            raise QualityError(
                f"{self._server.url} was restarted and no longer takes patterns from requests. "
                "Start it as it was; the same command then goes on."
            )
        voices = [Voice(self._cache.key(turn), {}, turn.arm.pattern) for turn in turns]
        found = ask(self._server, context, voices)
        for voice, one in zip(voices, found, strict=True):
            self._cache.check(voice.key, context, one.cached)
        asked = [turn.arm.pattern for turn in turns]
        check_obeyed(before, self._server.states(), asked, self._server.url)
        return found


class Separate:
    """A server for each arm."""

    block = 1

    def __init__(self, servers: Mapping[str, Server]) -> None:
        self._by_arm = dict(servers)
        self._caches = {name: _Cache() for name in servers}
        self.verified = all(_states(server) for server in servers.values())

    @property
    def servers(self) -> Sequence[Server]:
        """One for each arm, in their order."""
        return list(self._by_arm.values())

    def together(self, turns: Sequence[Turn]) -> list[list[Turn]]:
        """One after the other."""
        return [[turn] for turn in turns]

    def ask(self, ask: Ask, context: Context, turns: Sequence[Turn]) -> list[Any]:
        """See :class:`Arms`."""
        [turn] = turns
        server, cache = self._by_arm[turn.arm.name], self._caches[turn.arm.name]
        voice = Voice(cache.key(turn))
        before = self._checked(server, turn.arm)
        found = ask(server, context, [voice])
        if before:
            check_obeyed(before, self._checked(server, turn.arm), [turn.arm.pattern], server.url)
        cache.check(voice.key, context, found[0].cached)
        return found

    def _checked(self, server: Server, arm: Arm) -> list[RankState]:
        if not self.verified:
            return []
        states = server.states()
        _check_pattern(server, states, arm)
        return states


def longest_prompt(server: Server) -> int | None:
    """Tokens of the longest prompt that a server takes; None if it does not say."""
    try:
        found = server.server_info().get("max_req_input_len")
    except ServerUnavailableError:
        raise
    except ServerError:
        return None
    return None if found is None else int(found)


def facts(server: Server) -> dict[str, Any]:
    """What a server says of itself that may not change, by SGLang's names; empty if it is none."""
    try:
        info = server.server_info()
    except ServerError as error:
        if isinstance(error, ServerUnavailableError):
            raise
        return {}
    return protocol_facts(info, server.url)


def _states(server: Server) -> list[RankState]:
    """What IndexCache reports; nothing where it does not run."""
    try:
        return server.states()
    except ServerUnavailableError:
        raise
    except ServerError:
        return []


def _check_apart(arms: Sequence[Arm], urls: Mapping[str, Server]) -> None:
    """Two arms at one address would agree in everything, and nothing in their answers tells."""
    first: dict[tuple[str, str], str] = {}
    for arm in arms:
        server = urls[arm.name]
        place = server.url, str(getattr(server, "model", ""))  # chat completions may have several
        other = first.setdefault(place, arm.name)
        if other != arm.name:
            raise QualityError(
                f"{other} and {arm.name} are both to be asked at {server.url}, where one pattern "
                "runs: start a server for each, and give each its own address"
            )


def _check_alike(arms: Sequence[Arm], urls: Mapping[str, Server]) -> None:
    found = {arm.name: facts(urls[arm.name]) for arm in arms}
    if strangers := [urls[name].url for name, known in found.items() if not known]:
        raise QualityError(
            f"{', '.join(dict.fromkeys(strangers))} is no SGLang server: it has no /server_info. "
            "Another engine is asked by chat completions: give its address up to /v1."
        )
    (first, known), *others = found.items()
    for name, other in others:
        differing = [
            f"{fact} ({' and '.join(map(repr, said))})"
            for fact, said in alike({first: known, name: other}).items()
        ]
        if differing:
            raise QualityError(
                f"the servers of {first} and {name} differ in more than the pattern: "
                f"{'; '.join(differing)}. Start both with the same checkpoint and the same flags "
                "but --indexcache-pattern."
            )
    for arm in arms:
        if states := _states(urls[arm.name]):
            _check_pattern(urls[arm.name], states, arm)


def _check_pattern(server: Server, states: Sequence[RankState], arm: Arm) -> None:
    for state in states:
        if state.pattern != arm.pattern:
            raise QualityError(
                f"{server.url} is given for {arm.name}, which is {arm.pattern}, and runs "
                f"{state.pattern}. Start it with --indexcache-pattern {arm.pattern}."
            )
