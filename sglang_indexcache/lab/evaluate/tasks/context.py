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
from sglang_indexcache.support.lengths import counted

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""Text that says nothing, as in RULER."""
QUESTIONS = 8
"""Behind one generated context, if nothing else is asked for."""
_BATCH = 512
_DRAFTS = 3
"""After which a draft that is too long loses lines."""
Message = Mapping[str, str]
_MARK = "What is asked stands here."


class Tokenizer(Protocol):
    """Interface that we need of a transformers tokenizer."""

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        """``input_ids``: a list of ids for each text."""

    def get_vocab(self) -> Mapping[str, int]:
        """Every piece and its id; a leading space is U+0120 or U+2581."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of these ids."""


@dataclass(frozen=True)
class Asked:
    """A question as a task drafts it.

    Attributes:
        answer: what follows the text and ``begun``, to the letter.
        evidence: which lines of the draft it follows from; the first tells its depth.
        begun: the first words of the answer where the source gives them; fed in with the answer.
        cue: what stands before those where there is no chat template.
    """

    text: str
    answer: str
    evidence: tuple[int, ...]
    begun: str = ""
    cue: str = ""


@dataclass(frozen=True)
class Draft:
    """A context before it is measured.

    Attributes:
        opening: what is to be done with the lines.
        asked: in the order of asking, which says nothing of where the answers lie.
        kept: lines besides the evidence that must stay, or an answer would be another one.
        chat: whether it is written with the model's chat template, where it has one.
    """

    opening: str
    lines: list[str]
    asked: list[Asked]
    kept: frozenset[int] = frozenset()
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

    ``known`` are pieces of text that were tokenized before, with their ids.
    """

    tokens: int
    questions: int
    tokenizer: Tokenizer
    known: dict[str, list[int]] = field(default_factory=dict)

    def encode(self, pieces: Iterable[str]) -> list[list[int]]:
        """Return the ids of each piece."""
        pieces = list(pieces)
        new = list({piece: None for piece in pieces if piece not in self.known})
        if new:
            ids = self.tokenizer(new, add_special_tokens=False)["input_ids"]
            self.known.update(zip(new, ids, strict=True))
        return [self.known[piece] for piece in pieces]

    def words(self) -> list[str]:
        """Return the words that are one token behind a space, in the order of their ids."""
        pieces = sorted(self.tokenizer.get_vocab().items(), key=lambda item: item[1])
        found = (re.fullmatch("[\u0120\u2581]([A-Za-z]+)", piece) for piece, _ in pieces)
        return [match[1] for match in found if match]

    def cost(self, pieces: Iterable[str]) -> int:
        """Tokens of lines."""
        return sum(len(ids) for ids in self.encode(f"\n{piece}" for piece in pieces))

    def fill(self, lines: Iterator[str], *, beside: Sequence[str], least: int = 0) -> list[str]:
        """Take as many of ``lines`` as fit together with ``beside``, but at least ``least``."""
        left = self.tokens - self.cost(beside)
        taken: list[str] = []
        while batch := list(islice(lines, _BATCH)):
            for line, ids in zip(batch, self.encode(f"\n{one}" for one in batch), strict=True):
                left -= len(ids)
                if left < 0 and len(taken) >= least:
                    return taken
                taken.append(line)
        return taken


Task = Callable[[random.Random, Room], Draft]
"""From a source of chance and the room to a draft."""


def strata(draw: random.Random, count: int, total: int) -> list[int]:
    """``count`` different places among ``total``, one in each of as many equal parts, rising.

    Parts are whole, so that no two neighbours round to one place and ask the same question twice.
    """
    ends = [part * total // count for part in range(count + 1)]
    return [low + int(draw.random() * (high - low)) for low, high in pairwise(ends)]


def shuffled(draw: random.Random, asked: list[Asked]) -> list[Asked]:
    """In an order that does not give the depths away."""
    return draw.sample(asked, len(asked))


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
        asked = [_question(n, one, room, behind) for n, one in enumerate(draft.asked)]
        pieces = room.encode(f"\n{piece}" for piece in (draft.opening, *draft.lines))
        tail = max(len(one.ids) + len(one.answer) for one in asked)
        over = len(before) + sum(map(len, pieces)) + tail - length
        if over > 0 and last:
            draft, over = _shortened(draft, [len(piece) for piece in pieces[1:]], over, draw)
            pieces = room.encode(f"\n{piece}" for piece in (draft.opening, *draft.lines))
        if over <= 0:
            [noise] = room.encode([f" {NOISE}"])
            ids = [*before, *(noise * (-over // len(noise) + 1))[:-over]]
            starts = list(accumulate(map(len, pieces), initial=len(ids)))
            ids += chain.from_iterable(pieces)
            for question, one in zip(asked, draft.asked, strict=True):
                question.depth = starts[1 + one.evidence[0]] / len(ids)  # 0 is the opening
            return Context(f"{name}-{length}-{seed}", name, length, ids, asked)
        reserve = max(reserve + over, len(before) + tail)
    raise QualityError(
        f"with {counted(questions, 'question')} it does not fit {length} tokens, it is {over} too "
        "long"
    )


def _question(number: int, asked: Asked, room: Room, behind: list[int]) -> Question:
    """Make a question in tokens, its depth not known yet.

    ``behind`` are ids between a user's turn and the answer; none without a chat template.
    """
    begun, answer = "", asked.answer
    if behind:
        text, begun = f"\n{asked.text}", asked.begun.lstrip()
        answer = answer if begun else answer.lstrip()
    else:
        text = f"\n{asked.text}{asked.cue}{asked.begun}"
    first, then, last = room.encode([text, begun, answer])
    said = f"{asked.text}{asked.begun}"
    return Question(f"q{number}", [*first, *behind, *then], last, said, asked.answer, None)


def _shortened(
    draft: Draft, sizes: Sequence[int], over: int, draw: random.Random
) -> tuple[Draft, int]:
    """Without lines that no answer rests on, drawn until ``over`` tokens less are left.

    Returns:
        The draft, and the tokens that are still too many.
    """
    needed = draft.kept.union(*(asked.evidence for asked in draft.asked))
    spare = [number for number in range(len(draft.lines)) if number not in needed]
    gone: set[int] = set()
    for number in draw.sample(spare, len(spare)):
        if over <= 0:
            break
        gone.add(number)
        over -= sizes[number]
    left = [number for number in range(len(draft.lines)) if number not in gone]
    place = {number: new for new, number in enumerate(left)}
    asked = [
        replace(one, evidence=tuple(place[number] for number in one.evidence))
        for one in draft.asked
    ]
    return replace(draft, lines=[draft.lines[number] for number in left], asked=asked), over


def has_template(tokenizer: Tokenizer) -> bool:
    """Whether conversations are written as the model knows them."""
    return bool(getattr(tokenizer, "chat_template", None))


def around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids before and behind what a user says; the answer begins where the second ones end.

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
    [own], [whole] = (
        tokenizer(["a"], add_special_tokens=special)["input_ids"] for special in (False, True)
    )
    starts = (n for n in range(len(whole)) if list(whole[n : n + len(own)]) == list(own))
    return list(whole[: next(starts, 0)])


def rendered(messages: tuple[Message, ...], tokenizer: Tokenizer) -> list[int]:
    """Render a conversation by the tokenizer's chat template; as plain turns if it has none."""
    if not has_template(tokenizer):
        turns = [f"{one['role'].capitalize()}: {one['content']}" for one in messages]
        text = "\n".join([*turns, "Assistant:"])
        return list(tokenizer([text], add_special_tokens=True)["input_ids"][0])
    return list(_applied(messages, tokenizer, tokenize=True, return_dict=False))


def _applied(messages: tuple[Message, ...], tokenizer: Tokenizer, **how: bool) -> Any:
    try:
        return tokenizer.apply_chat_template(  # type: ignore[attr-defined]
            [dict(message) for message in messages],
            add_generation_prompt=True,
            enable_thinking=False,
            thinking=False,
            **how,
        )
    except Exception as error:  # a template is a program, and raises what it likes
        raise QualityError(f"the model's chat template refuses a conversation: {error}") from error
