"""How the arms of an evaluation are served.

* One server in live mode: every request names its pattern, and all arms share the batches.
* A server for each arm, in static mode.

Who is asked is made sure of before a context and checked after it, before it counts.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sglang_indexcache.errors import QualityError, ServerError, ServerUnavailableError
from sglang_indexcache.evaluate.cost import PAGE
from sglang_indexcache.evaluate.evaluation import Arm
from sglang_indexcache.evaluate.scoring import ArmRequest, Engine, Scored, score
from sglang_indexcache.evaluate.tasks import Context
from sglang_indexcache.pattern import PATTERN_OF_REQUEST

SAME = (
    "model_path",
    "version",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "attention_backend",
    "tp_size",
    "dp_size",
    "pp_size",
    "ep_size",
    "enable_dp_attention",
    "page_size",
    "chunked_prefill_size",
    "disable_radix_cache",
    "enable_deterministic_inference",
    "speculative_algorithm",
    "moe_runner_backend",
    "sampling_backend",
    "device",
)
"""Of SGLang's ``/server_info``: what may not differ between arms, nor change until the end."""


class ArmServer(Engine, Protocol):
    """What arms need of a server: ``client.Client``."""

    def states(self) -> list[dict[str, Any]]:
        """What IndexCache reports, one entry per data-parallel rank."""

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
        QualityError: the server is not in live mode, or does not run IndexCache.
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
            ArmRequest(
                one.arm,
                one.repeat,
                self._cache.key(one),
                {"custom_params": {PATTERN_OF_REQUEST: one.arm.pattern}},
            )
            for one in requests
        ]
        found = score(self._server, context, asked)
        for one, scored in zip(asked, found, strict=True):
            if others := [told for told in scored.patterns if told != [one.arm.pattern]]:
                said = f"with {others[0][0]}" if others[0] else "without saying under which pattern"
                raise QualityError(
                    f"{self._server.url} ignores the pattern of a request: it was asked for "
                    f"{one.arm.pattern} and answered {said}. Ask `indexcache server doctor --url` "
                    "what is wrong with its plugin."
                )
            self._cache.check(one.key, context, scored.cached)
        _check_used(self._server.url, before, self._server.states(), [one.arm for one in asked])
        return found

    def _live(self) -> list[dict[str, Any]]:
        states = self._server.states()
        if not states or any(state["mode"] != "live" for state in states):
            raise QualityError(
                f"{self._server.url} does not run in live mode, so it serves one pattern alone. "
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
        asked = ArmRequest(one.arm, one.repeat, cache.key(one))
        before = _states_of(server, one.arm)
        found = score(server, context, [asked])
        _check_used(server.url, before, _states_of(server, one.arm), [one.arm])
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
            f"{server.url} is no SGLang server: it has no /server_info. Run another engine with a "
            "harness of its own, and give its logs to `indexcache eval compare`."
        ) from error
    found = {name: info.get(name) for name in SAME if info.get(name) is not None}
    states = [
        state["indexcache"] for state in info.get("internal_states", []) if "indexcache" in state
    ]
    for state in states[:1]:
        found |= {name: state.get(name) for name in ("architecture", "checkpoint_pattern", "mode")}
        found["indexcache"] = state.get("version")
    return found


def _check_alike(arms: Sequence[Arm], urls: Mapping[str, ArmServer]) -> None:
    """Servers may differ in the pattern alone, and each must run its own."""
    found = {arm.name: facts(urls[arm.name]) for arm in arms}
    (first, known), *others = found.items()
    for name, other in others:
        differing = [
            f"{fact} ({known.get(fact)!r} and {other.get(fact)!r})"
            for fact in sorted({*known, *other})
            if known.get(fact) != other.get(fact)
        ]
        if differing:
            raise QualityError(
                f"the servers of {first} and {name} differ in more than the pattern: "
                f"{'; '.join(differing)}. Start both with the same checkpoint and the same flags "
                "but --indexcache-pattern."
            )
    for arm in arms:
        _states_of(urls[arm.name], arm)


def _states_of(server: ArmServer, arm: Arm) -> list[dict[str, Any]]:
    """The states of a server that must run the arm's pattern."""
    states = server.states()
    for state in states:
        if state["pattern"] != arm.pattern:
            raise QualityError(
                f"{server.url} is given for {arm.name}, which is {arm.pattern}, and runs "
                f"{state['pattern']}. Start it with --indexcache-pattern {arm.pattern}."
            )
    return states


def _check_used(
    url: str,
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    arms: Sequence[Arm],
) -> None:
    """Whether each layer did what the arms' patterns want of it.

    The counters do not see replayed CUDA graphs; where no forward was counted they say nothing.
    """
    [forwards] = _risen("forwards", before, after)
    if len(before) != len(after) or forwards < 0:
        raise ServerUnavailableError(f"{url} was restarted meanwhile: it counts anew")
    if not forwards:
        return
    kinds = list(zip(*(arm.pattern for arm in arms), strict=True))
    full = [layer for layer, kind in enumerate(kinds) if "F" in kind]
    shared = [layer for layer, kind in enumerate(kinds) if "F" not in kind]
    reuses = _risen("index_reuses", before, after)
    selections = _risen("indexer_selections", before, after)
    idle = [layer for layer in shared if reuses[layer] <= 0]
    idle += [layer for layer in full if selections[layer] <= 0]
    if idle:
        raise QualityError(
            f"{url} ignores the pattern: it says that it runs "
            f"{' and '.join(sorted({arm.pattern for arm in arms}))}, and layers "
            f"{', '.join(map(str, idle))} did not do what that wants of them. Ask `indexcache "
            "server doctor --url` what is wrong with its plugin."
        )


def _risen(
    name: str, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> list[int]:
    """By how much a counter rose, over all ranks; counters of layers one by one."""

    def total(states: Sequence[Mapping[str, Any]]) -> list[int]:
        rows = [state[name] if isinstance(state[name], list) else [state[name]] for state in states]
        return [sum(column) for column in zip(*rows, strict=True)]

    return [new - old for old, new in zip(total(before), total(after), strict=True)]
