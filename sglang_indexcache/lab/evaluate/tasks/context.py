"""A long context with questions behind it, of an exact number of tokens.

A task drafts lines of text for about the room that it is given; :func:`make_context` measures the
draft in tokens, asks for a smaller one until it fits, and fills what is left with neutral text in
front. Pieces (the opening, a line, a question, an answer) are tokenized apart and their ids are
joined: the ids are what the model is sent, so the length is exact for every tokenizer. Around them
stands what the model was trained on: its beginning of text, or its chat template.
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
"""Text that says nothing, as in RULER."""
QUESTIONS = 8
"""Questions behind one generated context, if nothing else is asked for."""
_BATCH = 512
_DRAFTS = 3
"""Drafts after which one that is too long loses lines."""
Message = Mapping[str, str]
_MARK = "What is asked stands here."


class Tokenizer(Protocol):
    """Interface that we need of a transformers tokenizer."""

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        """Return ``input_ids``: a list of ids for each text."""

    def get_vocab(self) -> Mapping[str, int]:
        """Return every piece and its id; a leading space is U+0120 or U+2581."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of these ids."""


@dataclass(frozen=True)
class Asked:
    """A question as a task drafts it.

    Attributes:
        answer: what follows the text and ``begun``, to the letter.
        evidence: which lines of the draft it follows from; the first tells its depth.
        begun: the first words of the answer where the source gives them; fed in with the answer.
    """

    text: str
    answer: str
    evidence: tuple[int, ...]
    begun: str = ""


@dataclass(frozen=True)
class Draft:
    """A context before it is measured.

    Attributes:
        opening: what is to be done with the lines.
        questions: in the order of asking, which says nothing of where the answers lie.
        chat: whether it is written with the model's chat template, where it has one.
    """

    opening: str
    lines: list[str]
    questions: list[Asked]
    chat: bool = True


@dataclass
class Question:
    """A question behind a context.

    Attributes:
        ids: its tokens, which follow the context's.
        answer: the answer's tokens, which follow those.
        depth: where in the context the first line lies that the answer follows from, 0 to 1; None
            where a user's file does not tell.
        by_token: whether each token of the answer counts, and not the whole alone.
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
        length: tokens of the context with its longest question and that question's answer.
        questions: each asked behind the context alone, none behind another.
    """

    name: str
    task: str
    length: int
    ids: list[int]
    questions: list[Question]


@dataclass(frozen=True)
class Room:
    """Room for a task to fill: tokens of opening and lines together, and questions.

    ``cache`` has the ids of pieces of text that were tokenized before.
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
        """Return the words that are one token behind a space, in the order of their ids."""
        pieces = sorted(self.tokenizer.get_vocab().items(), key=lambda item: item[1])
        matches = (re.fullmatch("[\u0120\u2581]([A-Za-z]+)", piece) for piece, _ in pieces)
        return [match[1] for match in matches if match]

    def cost(self, pieces: Iterable[str]) -> int:
        """Count the tokens of lines."""
        return sum(len(ids) for ids in self.encode(f"\n{piece}" for piece in pieces))

    def fill(self, lines: Iterator[str], *, beside: Sequence[str], least: int = 0) -> list[str]:
        """Take as many of ``lines`` as fit together with ``beside``, but at least ``least``."""
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
"""From a source of chance and the room to a draft."""


def strata(draw: random.Random, count: int, total: int) -> list[int]:
    """Draw ``count`` different places among ``total``, one in each of as many equal parts, rising.

    Parts are whole, so that no two neighbours round to one place and ask the same question twice.
    """
    ends = [part * total // count for part in range(count + 1)]
    return [low + int(draw.random() * (high - low)) for low, high in pairwise(ends)]


def shuffled(draw: random.Random, questions: list[Asked]) -> list[Asked]:
    """Return the questions in an order that does not give their depths away."""
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

    It is drafted until it fits, then filled up.

    Raises:
        QualityError: a length too small for the task.
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
                question.depth = starts[1 + drafted.evidence[0]] / len(ids)  # 0 is the opening
            return Context(f"{name}-{length}-{seed}", name, length, ids, tokenized)
        reserve = max(reserve + over, len(before) + tail)
    raise QualityError(
        f"with {counted(questions, 'question')} it does not fit {length} tokens, it is {over} too "
        "long"
    )


def _question(number: int, drafted: Asked, room: Room, behind: list[int]) -> Question:
    """Make a question in tokens, its depth not known yet.

    ``behind`` are ids between a user's turn and the answer; none without a chat template.
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
    """Remove lines that no answer rests on, drawn until ``over`` tokens less are left.

    Returns:
        The draft, and the tokens that are still too many.
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
    """Return whether conversations are written as the model knows them."""
    return bool(getattr(tokenizer, "chat_template", None))


def around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids before and behind a user's words; the answer begins where the second end.

    By the chat template, without thinking if it has a switch for that: a teacher-forced
    answer follows at once. Without a template, what the tokenizer begins a text with.

    Raises:
        QualityError: the template refuses a plain question, or changes it.
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
    [plain], [whole] = (
        tokenizer(["a"], add_special_tokens=special)["input_ids"] for special in (False, True)
    )
    starts = (n for n in range(len(whole)) if list(whole[n : n + len(plain)]) == list(plain))
    return list(whole[: next(starts, 0)])


def rendered(messages: tuple[Message, ...], tokenizer: Tokenizer) -> list[int]:
    """Render a conversation by the tokenizer's chat template; as plain turns if it has none."""
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
    except Exception as error:  # a template is a program, and raises what it likes
        raise QualityError(f"the model's chat template refuses a conversation: {error}") from error
