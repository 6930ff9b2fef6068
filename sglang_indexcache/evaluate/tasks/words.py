"""Words that tasks name things with, and running text cut into pieces."""

from __future__ import annotations

import random
from collections.abc import Iterator

from sglang_indexcache.errors import QualityError

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
ADJECTIVES, NOUNS = tuple(_ADJECTIVES.split()), tuple(_NOUNS.split())


def names(draw: random.Random, count: int) -> list[str]:
    """``count`` distinct ``adjective-noun``."""
    chosen = draw.sample(range(len(ADJECTIVES) * len(NOUNS)), count)
    return [f"{ADJECTIVES[n % len(ADJECTIVES)]}-{NOUNS[n // len(ADJECTIVES)]}" for n in chosen]


def windows(draw: random.Random, haystack: str, words: int) -> Iterator[str]:
    """Pieces of the haystack of ``words`` words each, in random order, none alike.

    Ends when the haystack does.
    """
    found = haystack.split()
    seen: set[str] = set()
    for place in draw.sample(range(len(found) // words), len(found) // words):
        piece = " ".join(found[place * words : (place + 1) * words])
        if piece not in seen:
            seen.add(piece)
            yield piece


def needs_haystack(task: str, haystack: str, words: int) -> None:
    """Refuse a haystack of fewer words.

    Raises:
        QualityError: it is shorter.
    """
    found = len(haystack.split())
    if found < words:
        raise QualityError(
            f"{task} needs a haystack of at least {words:,} words and got {found:,}; "
            "give it more text"
        )
