"""How a check says what it found: claims, one line of JSON each, as they are decided."""

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Literal, TypeAlias

Outcome: TypeAlias = Literal["proven", "refuted", "not reached", "dry"]
"""``dry`` is what a claim that held on a CPU is called: it proves nothing about a card."""


class MissingError(Exception):
    """What a claim needs is not on this machine, so nothing was found about it."""


class RefutedError(Exception):
    """The claim does not hold."""


def expect(holds: Any, otherwise: str) -> None:
    """Refute the claim at hand unless ``holds``."""
    if not holds:
        raise RefutedError(otherwise)


def need(name: str) -> Any:
    """Import a module that may not be here.

    Raises:
        MissingError: it cannot be imported.
    """
    try:
        return import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingError(f"{name} cannot be imported: {error}") from error


class Report:
    """The lines of one check.

    Attributes:
        claims: the names of what the check decides, in its order.
        dry: there is no card; stand-ins take the place of what needs one.
        servers: a dry run may start real servers.
    """

    def __init__(
        self, claims: tuple[str, ...], dry: bool, seconds: float, servers: bool = False
    ) -> None:
        self.claims, self.dry, self.servers = claims, dry, servers
        self._ends = time.monotonic() + seconds

    @property
    def device(self) -> str:
        """Where tensors live."""
        return "cpu" if self.dry else "cuda"

    def left(self) -> float:
        """Seconds before this process is stopped."""
        return max(1.0, self._ends - time.monotonic())

    @contextmanager
    def claim(self, name: str) -> Iterator[dict[str, Any]]:
        """Decide a claim: the block ends and it is proven, or raises and it is not.

        Yields:
            Evidence to fill in; it is written whatever the outcome.
        """
        evidence: dict[str, Any] = {}
        say(begin=name)
        outcome: Outcome = "dry" if self.dry else "proven"
        why = ""
        try:
            yield evidence
        except MissingError as missing:
            outcome, why = "not reached", str(missing)
        except RefutedError as refuted:
            outcome, why = "refuted", str(refuted)
        except Exception as error:  # whatever it is, the claim did not hold
            outcome, why = "refuted", f"{type(error).__name__}: {str(error)[:500]}"
            evidence["traceback"] = traceback.format_exc()[-2000:]
        say(claim=name, outcome=outcome, why=why, evidence=evidence)


def say(**line: Any) -> None:
    """One line for the parent process."""
    print(json.dumps(line, default=str), flush=True)
