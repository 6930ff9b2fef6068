"""MRCR: repeat the i-th of several look-alike answers of a long conversation.

Rows of openai/mrcr (MIT): ``prompt`` (chat messages as JSON), ``answer``,
``random_string_to_prepend``, ``n_needles``, ``desired_msg_index``, ``total_messages``. The
conversation is asked as it is. Its card's score is `metrics.mrcr`; three others are in circulation
and disagree with it, so it is for comparing arms, not with a table from elsewhere.
"""

from __future__ import annotations

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.metrics import MARK
from sglang_indexcache.evaluate.tasks.items import Item, Row, conversation, text_of


def mrcr(row: Row) -> Item:
    """A conversation and the answer that is to be repeated, its random string in front.

    Raises:
        QualityError: a field that is missing, or an answer without its random string.
    """
    messages = conversation(row.get("prompt"), "prompt")
    answer, mark = text_of(row, "answer"), text_of(row, "random_string_to_prepend")
    if len(mark) != MARK or not answer.startswith(mark):
        raise QualityError(
            f"answer does not begin with the {MARK} characters of random_string_to_prepend"
        )
    return Item(messages, answer, depth=_depth(row, [len(one["content"]) for one in messages]))


def _depth(row: Row, sizes: list[int]) -> float | None:
    place = row.get("desired_msg_index")
    if not isinstance(place, int) or not 0 <= place < len(sizes):
        return None
    return sum(sizes[:place]) / max(sum(sizes), 1)
