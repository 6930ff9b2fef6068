"""LongBench v2: multiple choice about a long document.

Rows of THUDM/LongBench-v2 (MIT; Bai et al. 2024, arXiv:2412.15204): ``context``, ``question``,
``choice_A`` to ``choice_D``, ``answer``. Asked in the words of its ``prompts/0shot.txt``; the
answer is read as its ``pred.py`` does (`metrics.longbench`). Guessing has 25 %.
"""

from __future__ import annotations

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.tasks.items import Item, Row, text_of
from sglang_indexcache.evaluate.tasks.lookup import LETTERS

BEGUN = "The correct answer is ("
_PROMPT = """Please read the following text and answer the question below.

<text>
{document}
</text>

What is the correct answer to this question: {question}
Choices:
{choices}

Format your response as follows: "The correct answer is (insert answer here)"."""


def longbench(row: Row) -> Item:
    """A document, a question and four choices.

    Raises:
        QualityError: a field that is missing, or an answer that is none of the letters.
    """
    choices = [f"({letter}) {text_of(row, f'choice_{letter}').strip()}" for letter in LETTERS]
    answer = text_of(row, "answer").strip()
    if answer not in tuple(LETTERS):
        raise QualityError(f"answer is {answer!r}, and none of {', '.join(LETTERS)}")
    prompt = _PROMPT.format(
        document=text_of(row, "context").strip(),
        question=text_of(row, "question").strip(),
        choices="\n".join(choices),
    )
    return Item(({"role": "user", "content": prompt},), answer, BEGUN)
