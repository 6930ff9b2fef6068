"""Running text, and short facts to hide in it and ask for at its end, all made of listed words.

The facts are keys with values, and rules by example. They test what passages of running text do
not: a value that stands in only one place, and a rule that no single place states. Evaluation asks
`notes` in this form, and a search mixes both kinds into its calibration data.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

_ADJECTIVES = (
    "ancient bitter brave bright broken calm careful cheap clever cold curious damp dark deep "
    "distant dry eager early empty fair famous fancy fierce flat formal fresh gentle giant golden "
    "grand happy heavy hidden hollow honest humble icy idle jolly keen kind late lazy light little "
    "lively lonely loud lucky mellow merry modern narrow neat noble odd old pale plain polite "
    "proud quick quiet rapid rare ripe rough round royal rusty sharp shiny short silent silver "
    "simple slow small smooth soft solid steep strange strong sudden sweet swift tall tender thick "
    "tidy tiny tough vivid warm wide wild wise young"
)
_NOUNS = (
    "acorn anchor apple arrow badger balloon banjo barrel basket beacon bell bicycle blanket boat "
    "bottle bridge bucket button camel candle canyon carpet castle cedar chimney clock cloud comet "
    "compass copper cradle crystal curtain dolphin donkey drum eagle engine falcon feather fiddle "
    "fountain garden glacier goblet hammer harbor harvest helmet heron island jacket kettle ladder "
    "lantern lemon lizard magnet maple marble meadow mirror monkey needle orchard otter paddle "
    "parrot pebble pencil pepper piano pillow pirate planet pocket pumpkin quilt rabbit ribbon "
    "river rocket saddle sailor scarf shovel spider squirrel stable tapir thimble tiger tractor "
    "trumpet tunnel turtle valley velvet violin walnut whistle willow window zebra"
)
_VERBS = (
    "carried covered crossed filled followed found guarded held hid kept left lifted lost met "
    "moved needed painted passed pulled pushed reached saved shook showed sold stopped touched "
    "traded turned watched"
)
_WHERE = ("above", "across", "against", "along", "behind", "below", "beside", "near", "under")
_PATTERNS = (
    "the A N V the N W the A N",
    "W the N , one A N V every N",
    "no N V the A N before the N did",
    "one N and one A N were W the N",
    "when the N was A , the A N V it",
    "nobody knew why the N V one A N",
)
HAYSTACK_CHARACTERS = 6_000_000
"""Length of the text in characters, enough for 200,000 tokens of passages that occur once."""
ADJECTIVES, NOUNS, VERBS = (tuple(words.split()) for words in (_ADJECTIVES, _NOUNS, _VERBS))


@cache
def haystack() -> str:
    """Return a text in which tasks hide lines: plain sentences that no model could know."""
    draw = random.Random("prose")
    lines: list[str] = []
    length = 0
    while length < HAYSTACK_CHARACTERS:
        sentences = (_PATTERNS[draw.randrange(len(_PATTERNS))] for _ in range(6))
        lines.append(" ".join(_sentence(draw, pattern) for pattern in sentences))
        length += len(lines[-1]) + 1
    return "\n".join(lines)


def _sentence(draw: random.Random, pattern: str) -> str:
    words = {"A": ADJECTIVES, "N": NOUNS, "V": VERBS, "W": _WHERE}
    parts = (
        words[part][draw.randrange(len(words[part]))] if part in words else part
        for part in pattern.split()
    )
    sentence = " ".join(parts).replace(" ,", ",")
    return f"{sentence[0].upper()}{sentence[1:]}."


NOTES, EXAMPLES, ASKED = 6, 4, 2
"""Number of keys with values, and numbers of a rule's examples and questions."""


@dataclass(frozen=True)
class Fact:
    """A hidden line, and the question about it at the end of the text.

    Attributes:
        shown: the hidden line; empty if only the rule gives the answer.
        cue: the text before the answer; empty for an example that is not asked for.
        answer: the exact text after the cue.
    """

    shown: str
    cue: str = ""
    answer: str = ""


def note(name: str, value: str) -> Fact:
    """Return the fact that a key has a value."""
    return Fact(f"# {name} is {value}", f"? {name} is", f" {value}")


def notes_and_rule(draw: random.Random) -> list[Fact]:
    """Draw six keys with words and numbers as values, and a rule with four examples.

    The rule turns ``swift river`` into ``river, swift``; two new pairs are asked for.
    """
    names = draw.sample(NOUNS, NOTES + NOTES // 2)
    words, numbers = names[NOTES:], draw.sample(range(1000, 10_000), NOTES - NOTES // 2)
    values: Sequence[str] = [*words, *map(str, numbers)]
    facts = [note(name, value) for name, value in zip(names, values, strict=False)]
    qualities = draw.sample(ADJECTIVES, EXAMPLES + ASKED)
    things = draw.sample(NOUNS, EXAMPLES + ASKED)
    pairs = [(f"{a} {b} ->", f" {b}, {a}") for a, b in zip(qualities, things, strict=True)]
    facts += [Fact(before + after) for before, after in pairs[:EXAMPLES]]
    return facts + [Fact("", before, after) for before, after in pairs[EXAMPLES:]]
