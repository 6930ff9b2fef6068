"""A long context with an exact number of tokens, followed by questions.

A task drafts lines of text for about the given room. :func:`make_context` measures the draft in
tokens, asks for a smaller draft until it fits, and fills the rest with neutral text in front.
Pieces (the opening, a line, a question, an answer) are tokenized separately and their ids are
joined. The ids themselves are sent to the model, so the length is exact for every tokenizer. They
are enclosed in what the model was trained with: its beginning of text, or its chat template.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, islice, pairwise
from typing import Any, Protocol

from sglang_indexcache.errors import QualityError
from sglang_indexcache.library.lengths import counted

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""Neutral text without information, as in RULER."""
QUESTIONS = 8
"""Default number of questions after one generated context."""
_BATCH = 512
_DRAFTS = 3
"""Number of drafts after which a draft that is too long loses lines."""
Message = Mapping[str, str]
_MARK = "What is asked stands here."


class Tokenizer(Protocol):
    """Interface that we need from a transformers tokenizer."""

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        """Return ``input_ids``, a list of ids for each text."""

    def get_vocab(self) -> Mapping[str, int]:
        """Return every token's text and id; a leading space is U+0120 or U+2581."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of these ids."""


@dataclass(frozen=True)
class Asked:
    """A question in a task's draft.

    Attributes:
        answer: the exact text that follows ``text`` and ``begun``.
        evidence: numbers of the draft's lines from which it follows; the first tells its depth.
        begun: the first words of the answer, if the source gives them; they are fed in before the
            answer.
    """

    text: str
    answer: str
    evidence: tuple[int, ...]
    begun: str = ""


@dataclass(frozen=True)
class Draft:
    """A context before its tokens are counted.

    Attributes:
        opening: instruction for the lines.
        questions: questions in the order of asking, which is independent of where the answers lie.
        chat: whether to use the model's chat template, if it has one.
    """

    opening: str
    lines: list[str]
    questions: list[Asked]
    chat: bool = True


@dataclass
class Question:
    """A question after a context.

    Attributes:
        ids: the question's tokens, which follow the context's.
        answer: the answer's tokens, which follow the question's.
        depth: place in the context, 0 to 1, of the first line from which the answer follows; None
            if a user's file does not tell.
        by_token: whether each token of the answer counts, instead of only the whole.
    """

    name: str
    ids: list[int]
    answer: list[int]
    text: str
    answer_text: str
    depth: float | None
    by_token: bool = False


@dataclass(frozen=True)
class Context:
    """Text that is computed once and asked several times.

    Attributes:
        length: number of tokens of the context with its longest question and that question's
            answer.
        questions: questions that are each asked directly after the context.
    """

    name: str
    task: str
    length: int
    ids: list[int]
    questions: list[Question]


@dataclass(frozen=True)
class Room:
    """Room for a task to fill: tokens for opening and lines together, and number of questions.

    ``cache`` has the ids of pieces of text that were already tokenized.
    """

    tokens: int
    questions: int
    tokenizer: Tokenizer
    cache: dict[str, list[int]] = field(default_factory=dict)

    def encode(self, pieces: Iterable[str]) -> list[list[int]]:
        """Return the ids of each piece."""
        pieces = list(pieces)
        new = list({piece: None for piece in pieces if piece not in self.cache})
        if new:
            ids = self.tokenizer(new, add_special_tokens=False)["input_ids"]
            self.cache.update(zip(new, ids, strict=True))
        return [self.cache[piece] for piece in pieces]

    def words(self) -> list[str]:
        """Return the words that are a single token after a space, in the order of their ids."""
        pieces = sorted(self.tokenizer.get_vocab().items(), key=lambda item: item[1])
        matches = (re.fullmatch("[\u0120\u2581]([A-Za-z]+)", piece) for piece, _ in pieces)
        return [match[1] for match in matches if match]

    def cost(self, pieces: Iterable[str]) -> int:
        """Count the tokens of lines."""
        return sum(len(ids) for ids in self.encode(f"\n{piece}" for piece in pieces))

    def fill(self, lines: Iterator[str], *, beside: Sequence[str], least: int = 0) -> list[str]:
        """Return as many of ``lines`` as fit together with ``beside``, but at least ``least``."""
        budget = self.tokens - self.cost(beside)
        chosen: list[str] = []
        while batch := list(islice(lines, _BATCH)):
            for line, ids in zip(batch, self.encode(f"\n{piece}" for piece in batch), strict=True):
                budget -= len(ids)
                if budget < 0 and len(chosen) >= least:
                    return chosen
                chosen.append(line)
        return chosen


Task = Callable[[random.Random, Room], Draft]
"""Function from a random generator and the room to a draft."""


def strata(draw: random.Random, count: int, total: int) -> list[int]:
    """Draw ``count`` different, rising places among ``total``, one from each equal part.

    Parts have whole bounds, so that no two neighbours round to the same place and the same
    question.
    """
    ends = [part * total // count for part in range(count + 1)]
    return [low + int(draw.random() * (high - low)) for low, high in pairwise(ends)]


def shuffled(draw: random.Random, questions: list[Asked]) -> list[Asked]:
    """Return the questions in an order that does not reveal their depths."""
    return draw.sample(questions, len(questions))


def make_context(
    name: str,
    task: Task,
    tokenizer: Tokenizer,
    length: int,
    seed: int,
    questions: int = QUESTIONS,
) -> Context:
    """Make a context with its questions; the same for the same arguments, byte for byte.

    The context is drafted until it fits, then filled up.

    Raises:
        QualityError: the length is too small for the task.
    """
    room = Room(length, questions, tokenizer)
    reserve = over = 0
    for last in (*[False] * (_DRAFTS - 1), True):
        draw = random.Random(f"{name} {length} {seed}")
        draft = task(draw, replace(room, tokens=length - reserve))
        before, behind = around(tokenizer) if draft.chat else (beginning(tokenizer), [])
        tokenized = [
            _question(n, drafted, room, behind) for n, drafted in enumerate(draft.questions)
        ]
        pieces = room.encode(f"\n{piece}" for piece in (draft.opening, *draft.lines))
        tail = max(len(question.ids) + len(question.answer) for question in tokenized)
        over = len(before) + sum(map(len, pieces)) + tail - length
        if over > 0 and last:
            draft, over = _shortened(draft, [len(piece) for piece in pieces[1:]], over, draw)
            pieces = room.encode(f"\n{piece}" for piece in (draft.opening, *draft.lines))
        if over <= 0:
            [noise] = room.encode([f" {NOISE}"])
            ids = [*before, *(noise * (-over // len(noise) + 1))[:-over]]
            starts = list(accumulate(map(len, pieces), initial=len(ids)))
            ids += chain.from_iterable(pieces)
            for question, drafted in zip(tokenized, draft.questions, strict=True):
                question.depth = starts[1 + drafted.evidence[0]] / len(ids)  # after the opening
            return Context(f"{name}-{length}-{seed}", name, length, ids, tokenized)
        reserve = max(reserve + over, len(before) + tail)
    raise QualityError(
        f"with {counted(questions, 'question')} it does not fit {length} tokens, it is {over} too "
        "long"
    )


def _question(number: int, drafted: Asked, room: Room, behind: list[int]) -> Question:
    """Make a question in tokens, with its depth still unknown.

    ``behind`` has the ids between the user's turn and the answer; empty without a chat template.
    """
    beginning, answer = "", drafted.answer
    if behind:
        text, beginning = f"\n{drafted.text}", drafted.begun.lstrip()
        answer = answer if beginning else answer.lstrip()
    else:
        text = f"\n{drafted.text}{drafted.begun}"
    first, start, last = room.encode([text, beginning, answer])
    turn_text = f"{drafted.text}{drafted.begun}"
    return Question(f"q{number}", [*first, *behind, *start], last, turn_text, drafted.answer, None)


def _shortened(
    draft: Draft, sizes: Sequence[int], over: int, draw: random.Random
) -> tuple[Draft, int]:
    """Remove random lines on which no answer depends, until ``over`` tokens are removed.

    Returns:
        The draft, and the number of tokens by which it is still too long.
    """
    evidence = {number for question in draft.questions for number in question.evidence}
    spare = [number for number in range(len(draft.lines)) if number not in evidence]
    removed: set[int] = set()
    for number in draw.sample(spare, len(spare)):
        if over <= 0:
            break
        removed.add(number)
        over -= sizes[number]
    remaining = [number for number in range(len(draft.lines)) if number not in removed]
    place = {number: new for new, number in enumerate(remaining)}
    questions = [
        replace(question, evidence=tuple(place[number] for number in question.evidence))
        for question in draft.questions
    ]
    lines = [draft.lines[number] for number in remaining]
    return replace(draft, lines=lines, questions=questions), over


def has_template(tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids before and after a user's text; the answer comes after the second ids.

    They come from the chat template, with thinking off if it has a switch for that, because a
    teacher-forced answer follows at once. Without a template they are the tokenizer's beginning of
    text.

    Raises:
        QualityError: the template refuses or changes a plain question.
    """
    if not has_template(tokenizer):
        return beginning(tokenizer), []
    before, mark, behind = _applied(
        ({"role": "user", "content": _MARK},), tokenizer, tokenize=False
    ).partition(_MARK)
    if not mark:
        raise QualityError("the model's chat template changes what a user says")
    ids = tokenizer([before, behind], add_special_tokens=False)["input_ids"]
    return list(ids[0]), list(ids[1])


def beginning(tokenizer: Tokenizer) -> list[int]:
    """Return the ids with which the tokenizer begins a text; mostly one or none."""
    [plain], [opened] = (
        tokenizer(["a"], add_special_tokens=special)["input_ids"] for special in (False, True)
    )
    starts = (n for n in range(len(opened)) if list(opened[n : n + len(plain)]) == list(plain))
    return list(opened[: next(starts, 0)])


def rendered(messages: tuple[Message, ...], tokenizer: Tokenizer) -> list[int]:
    """Render a conversation with the tokenizer's chat template, or as plain turns without one."""
    if not has_template(tokenizer):
        turns = [f"{message['role'].capitalize()}: {message['content']}" for message in messages]
        text = "\n".join([*turns, "Assistant:"])
        return list(tokenizer([text], add_special_tokens=True)["input_ids"][0])
    return list(_applied(messages, tokenizer, tokenize=True, return_dict=False))


def _applied(messages: tuple[Message, ...], tokenizer: Tokenizer, **options: bool) -> Any:
    try:
        return tokenizer.apply_chat_template(  # type: ignore[attr-defined]
            [dict(message) for message in messages],
            add_generation_prompt=True,
            enable_thinking=False,
            thinking=False,
            **options,
        )
    except Exception as error:  # a template is a program and may raise any error
        raise QualityError(f"the model's chat template refuses a conversation: {error}") from error
