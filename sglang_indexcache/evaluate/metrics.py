"""What the tasks' sources give a reply, beside whether it is right to the letter.

Kits score the same reply differently (three rules for MRCR are in circulation), so a score is for
comparing arms of one evaluation, not with a table from elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import SequenceMatcher

MARK = 10
"""Characters that ``rounds`` asks to be put in front."""
_OF_A_WORD = r"[^\W\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"
"""Thai, Japanese, Chinese and Korean put no space around the words that an answer may be."""


def contained(reply: str, answer: str) -> float:
    """RULER's ``string_match_all``: share of the answer's parts in the reply, whatever the case."""
    parts = [part.strip().lower() for part in answer.split(",")]
    return sum(part in reply.lower() for part in parts) / len(parts)


def marked_ratio(reply: str, answer: str) -> float:
    """MRCR's rule, as on its card: 0 without the mark in front, else the ratio of what follows."""
    return mrcr(reply.strip(), answer.strip())


def mrcr(reply: str, answer: str) -> float:
    """MRCR's rule to the letter: a reply that begins with white space has no mark in front."""
    if not reply.startswith(answer[:MARK]):
        return 0.0
    return SequenceMatcher(None, reply[MARK:], answer[MARK:]).ratio()


def nodes_f1(reply: str, answer: str) -> float:
    """GraphWalks' F1 of two sets of nodes, 1 if both are empty.

    The card's formula read to the letter also gives 1 to a wholly wrong answer; lm-eval gives it 0,
    and so does this.
    """
    found, right = (
        {node.strip() for node in text.rpartition("[")[2].partition("]")[0].split(",")} - {""}
        for text in (reply, answer)
    )
    if not found and not right:
        return 1.0
    return 2 * len(found & right) / (len(found) + len(right))


def graphwalks(reply: str, answer: str) -> float:
    """GraphWalks' rule: the F1 of the list in the very last line, which says "Final Answer: [..]".

    The card's code leaves those words in front of the first node, which then never counts; every
    kit takes them off, and so does this.
    """
    found = re.search(r"Final Answer: ?\[.*\]", reply.split("\n")[-1])
    return nodes_f1(found[0], answer) if found else 0.0


def longbench(reply: str, answer: str) -> float:
    """LongBench v2's rule: the letter behind "The correct answer is", in brackets or without."""
    said = reply.replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", said) or re.search(
        r"The correct answer is ([A-D])", said
    )
    return float(found is not None and found[1] == answer)


def holds(reply: str, answer: str) -> float:
    """Whether the answer stands in the reply as words of its own, whatever the case."""
    wanted = re.escape(answer.strip())
    found = re.search(rf"(?<!{_OF_A_WORD}){wanted}(?!{_OF_A_WORD})", reply, re.IGNORECASE)
    return float(found is not None)


def first_letter(reply: str, answer: str) -> float:
    """The letter by itself, as the question asks for it, or in a sentence like the question's.

    Not the first letter of prose: "Based on" does not say B, nor "A section" A.
    """
    said = re.match(r"\W*([A-D])(?!\w| \w)", reply)
    return float(said is not None and said[1] == answer) or longbench(reply, answer)


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
    "mrcr": mrcr,
    "graphwalks": graphwalks,
    "longbench-v2": longbench,
    "prompts": holds,
}
"""By task: from a reply and the right answer to 0 to 1."""
