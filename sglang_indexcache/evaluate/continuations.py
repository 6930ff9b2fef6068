"""What the reference says behind a prompt whose right answer nobody knows.

All arms, and the reference once more, are then scored on it like on a right answer: how far the
distribution moves at each token, and how often the likeliest one is another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.scoring import Engine, Voice, ask, computed
from sglang_indexcache.evaluate.shelf import CONTINUED
from sglang_indexcache.evaluate.tasks import Context


@dataclass(frozen=True)
class Continued:
    """What a voice said behind a context.

    Attributes:
        ids: its tokens.
        cached: tokens of the context that were cached before.
        computed: tokens that the server computed.
    """

    ids: list[int]
    cached: int
    computed: int


def is_open(context: Context) -> bool:
    """Whether a question of it has no answer yet."""
    return any(not question.answer for question in context.questions)


def closed(context: Context, ids: list[int]) -> Context:
    """The context with ``ids`` in the place of its answer."""
    return replace(context, questions=[replace(one, answer=ids) for one in context.questions])


def continue_it(engine: Engine, context: Context, voices: Sequence[Voice]) -> list[Continued]:
    """Let voices say what comes behind a context, greedily.

    Raises:
        ServerUnavailableError: no answer, or the server gave a request up.
        QualityError: an answer that is not one to what was asked.
    """
    found = []
    replies = ask(engine, [context.ids] * len(voices), voices, CONTINUED)
    for reply in replies:
        info, ids = reply["meta_info"], [int(i) for i in reply.get("output_ids") or ()]
        if not ids:
            raise QualityError(f"{engine.url} said nothing behind {context.name}")
        found.append(Continued(ids, info["cached_tokens"], computed(info) + len(ids)))
    return found
