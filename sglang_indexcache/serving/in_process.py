"""An in-process SGLang engine in live mode, with the calls that a client has."""

from __future__ import annotations

from typing import Any

from sglang_indexcache.ask.protocol import RankState, states_of
from sglang_indexcache.errors import ServerError
from sglang_indexcache.serving.live import switch_request
from sglang_indexcache.serving.settings import BACKEND_NAME


class InProcessEngine:
    """``sglang.Engine`` whose pattern can be replaced; use it as a context manager.

    Args:
        engine_arguments: as for ``sglang.Engine``; the backend and the mode are set here.
    """

    name = "the engine in this process"

    def __init__(self, **engine_arguments: Any) -> None:
        import sglang

        self._engine = sglang.Engine(
            **{
                "attention_backend": BACKEND_NAME,
                "indexcache_mode": "live",
                "log_level": "error",
                **engine_arguments,
            }
        )

    def __enter__(self) -> InProcessEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.shutdown()

    def states(self) -> list[RankState]:
        """What IndexCache reports, one entry per data-parallel rank.

        Raises:
            ServerError: the engine cannot say what it does.
        """
        return states_of(self._engine.get_server_info(), self.name)

    def switch_pattern(self, value: str) -> list[RankState]:
        """Make ``value`` the pattern on every rank; returns the new states.

        Raises:
            ServerError: with the engine's reason, if it refused.
        """
        from sglang.srt.managers.io_struct import SetInternalStateReq

        request = SetInternalStateReq(**switch_request(value))
        manager = self._engine.tokenizer_manager
        accepted = self._engine.loop.run_until_complete(manager.set_internal_state(request))
        states = self.states()
        if not all(accepted):
            reasons = {state.last_rejection for state in states} - {""}
            raise ServerError(f"the engine refused {value!r}: {'; '.join(sorted(reasons))}")
        return states

    def low_priority(self) -> int:
        """Refused: nobody else asks this engine.

        Raises:
            ServerError: always.
        """
        raise ServerError("an engine in this process serves nobody else who could go first")

    def generate(self, *, timeout: float | None = None, **body: Any) -> Any:
        """SGLang's native generate. Takes as long as it takes: nothing can get lost on the way."""
        return self._engine.generate(**body)
