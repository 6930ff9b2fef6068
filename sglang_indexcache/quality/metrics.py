"""What the tasks' sources give a reply, beside whether it is right to the letter.

Kits score the same reply differently (three rules for MRCR are in circulation), so a score is for
comparing arms of one evaluation, not with a table from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import SequenceMatcher

MARK = 10
"""Characters that ``rounds`` asks to be put in front."""


def contained(reply: str, answer: str) -> float:
    """RULER's ``string_match_all``: share of the answer's parts in the reply, whatever the case."""
    parts = [part.strip().lower() for part in answer.split(",")]
    return sum(part in reply.lower() for part in parts) / len(parts)


def marked_ratio(reply: str, answer: str) -> float:
    """MRCR's rule, as on its card: 0 without the mark in front, else the ratio of what follows."""
    reply, answer = reply.strip(), answer.strip()
    if not reply.startswith(answer[:MARK]):
        return 0.0
    return SequenceMatcher(None, reply[MARK:], answer[MARK:]).ratio()


def nodes_f1(reply: str, answer: str) -> float:
    """GraphWalks' F1 of two sets of nodes; 1 if both are empty, as its corrected card has it."""
    found, right = (
        {node.strip() for node in text.partition("]")[0].split(",")} - {""}
        for text in (reply, answer)
    )
    if not found and not right:
        return 1.0
    return 2 * len(found & right) / (len(found) + len(right))


def first_letter(reply: str, answer: str) -> float:
    """LongBench v2's letter, behind the bracket that the question ends with."""
    return float(reply.strip()[:1] == answer)


def first_word(reply: str, answer: str) -> float:
    """The word that was asked for."""
    return float(reply.split()[:1] == [answer.strip()])


METRICS: dict[str, Callable[[str, str], float]] = {
    "needles": contained,
    "needles-text": contained,
    "tracking": contained,
    "rounds": marked_ratio,
    "parents": nodes_f1,
    "lookup": first_letter,
    "notes": first_word,
}
"""By task: from a reply and the right answer to 0 to 1."""
