"""The F/S pattern: which DSA layers keep their indexer, and whose indices the others reuse.

A pattern is a string over {F, S}, one character per attention layer with an indexer. An F (full)
layer runs its indexer; an S (shared) layer has none and reuses the top-k indices of the nearest
earlier F layer (paper section "Method", ``f(l) = max{j < l : c_j = F}``). Layers are counted
from 0 here, as in SGLang and transformers; the paper counts from 1.

A third letter, L, is a layer that selects by its own folded score (``fold.py``). It keeps its
indexer, and S layers take from it as from an F layer: whoever does not fold takes it for an F.

Behind the letters may stand, in this order, ``+c4`` (F layers choose among 4 k candidates of their
folded score) and ``@0123456789ab`` (by which slopes layers fold). They are part of the pattern
wherever one is named or compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from hashlib import sha256
from itertools import pairwise

from sglang_indexcache.errors import PatternError, quoted

FULL = "F"
SHARED = "S"
FOLDED = "L"
MOST_CANDIDATES = 64
"""Of a folded F layer, in lengths of its list."""
SLOPES_FILE = ".slopes"
"""How the name of a file of slopes ends, which may stand in the place of their digest."""

_INDEXER_TYPES = {FULL: "full", SHARED: "shared"}
_FACTOR = re.compile(r"\+c([1-9][0-9]?)\Z")
_DIGEST = re.compile(r"@([0-9a-f]{12})\Z")
_LEFT_OVER = re.compile(r"\+c?\d*\Z")


@dataclass(frozen=True)
class Suffix:
    """Suffix behind the letters of a pattern, or behind any name of one.

    Attributes:
        factor: ``+cN``, how many times as many candidates an F layer folds for; 1 without.
        slopes: behind ``@``, the first twelve hex digits of the slopes' digest, or of a name the
            path of their file; "" without.
    """

    factor: int = 1
    slopes: str = ""

    def __str__(self) -> str:
        factor = f"+c{self.factor}" if self.factor > 1 else ""
        return factor + (f"@{self.slopes}" if self.slopes else "")


@dataclass(frozen=True)
class Group:
    """An F or L layer and the layers that use its indices, itself included."""

    source: int
    layers: range


@dataclass(frozen=True)
class Pattern:
    """An immutable, valid pattern.

    ``str(pattern)`` is the F/S string, behind it the suffix if there is one; ``len(pattern)`` is
    the number of layers.

    Raises:
        PatternError: on construction, if ``text`` is not a pattern.
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise PatternError(f"a pattern is a string of F and S, got {type(self.text).__name__}")
        _check_layers(self.layers)
        _check_folding(self)

    # -- reading it ---------------------------------------------------------------------------

    def __str__(self) -> str:
        return self.text

    def __len__(self) -> int:
        return len(self.layers)

    @cached_property
    def layers(self) -> str:
        """The F/S string alone, one character per layer."""
        return split_suffix(self.text)[0]

    @cached_property
    def suffix(self) -> Suffix:
        """The suffix behind the letters."""
        return split_suffix(self.text)[1]

    def with_suffix(self, suffix: Suffix) -> Pattern:
        """Return the same letters with another suffix in place of their own."""
        return Pattern(f"{self.layers}{suffix}")

    @cached_property
    def is_folded(self) -> bool:
        """Whether some layer selects by its folded score, or picks candidates by it."""
        return FOLDED in self.layers or self.suffix.factor > 1

    def fold_at(self, layer: int) -> int:
        """Return how many times its list's length ``layer`` picks as candidates by folded score.

        1 where that is the selection (L); 0 where nothing is folded.
        """
        if self.layers[self._checked(layer)] == FULL:
            return self.suffix.factor if self.suffix.factor > 1 else 0
        return int(self.layers[layer] == FOLDED)

    def is_full(self, layer: int) -> bool:
        """Return whether ``layer`` runs its own indexer: it is F, or L."""
        return self.layers[self._checked(layer)] != SHARED

    @cached_property
    def full_layers(self) -> tuple[int, ...]:
        """The layers that run their own indexer, F and L, ascending."""
        return tuple(i for i, c in enumerate(self.layers) if c != SHARED)

    @cached_property
    def shared_layers(self) -> tuple[int, ...]:
        """The S layers, ascending."""
        return tuple(i for i, c in enumerate(self.layers) if c == SHARED)

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Layer whose indices each layer uses: the F or L layer before it, or itself if one."""
        result: list[int] = []
        for layer, kind in enumerate(self.layers):
            result.append(result[-1] if kind == SHARED else layer)
        return tuple(result)

    def source_of(self, layer: int) -> int:
        """Return the F or L layer whose indices ``layer`` uses."""
        return self.sources[self._checked(layer)]

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The pattern cut into runs that share one set of indices."""
        bounds = [*self.full_layers, len(self)]
        return tuple(Group(start, range(start, end)) for start, end in pairwise(bounds))

    @property
    def retention(self) -> Fraction:
        """Layers that keep their indexer over all layers, exactly."""
        return Fraction(len(self.full_layers), len(self))

    @property
    def digest(self) -> str:
        """Twelve hex digits that stand for the pattern where its text is too long, as in a key."""
        return sha256(self.text.encode()).hexdigest()[:12]

    def summary(self) -> str:
        """Return one phrase: ``12 of 47 layers keep their indexer (25.5 %)``."""
        full, total = len(self.full_layers), len(self)
        phrase = f"{full} of {total} layers keep their indexer ({100 * full / total:.1f} %)"
        if folded := self.layers.count(FOLDED):
            phrase += f", {folded} of them folded"
        if (factor := self.suffix.factor) > 1:
            phrase += f"; F layers choose among {factor} k candidates of their folded score"
        return phrase

    # -- making it ----------------------------------------------------------------------------

    @classmethod
    def full(cls, num_layers: int) -> Pattern:
        """Make a pattern with every layer F: plain DSA."""
        return cls(FULL * num_layers)

    @classmethod
    def uniform(cls, num_layers: int, ratio: int) -> Pattern:
        """Make the paper's uniform interleaving at retention 1/``ratio``: F, then ratio-1 S."""
        if ratio < 1:
            raise PatternError(
                f"uniform interleaving keeps 1/r of the indexers, r >= 1; got {ratio}"
            )
        return cls("".join(FULL if i % ratio == 0 else SHARED for i in range(num_layers)))

    @classmethod
    def folded(cls, base: Pattern, ratio: int | None = None) -> Pattern:
        """Make ``base`` with L for each of its indexers, but F for the first of every ``ratio``."""
        exact = base.full_layers[::ratio] if ratio else ()
        folded = set(base.full_layers).difference(exact)
        return cls("".join(FOLDED if i in folded else c for i, c in enumerate(base.layers)))

    @classmethod
    def from_layers(cls, num_layers: int, full_layers: Iterable[int]) -> Pattern:
        """Make the pattern whose F layers are ``full_layers``."""
        full = set(full_layers)
        if outside := sorted(full - set(range(num_layers))):
            raise PatternError(
                f"layers {_join(outside)} do not exist in a {num_layers}-layer model"
            )
        return cls("".join(FULL if i in full else SHARED for i in range(num_layers)))

    @classmethod
    def from_indexer_types(cls, types: Sequence[str]) -> Pattern:
        """Read the ``indexer_types`` list of a HF config ("full" / "shared")."""
        letters = {name: letter for letter, name in _INDEXER_TYPES.items()}
        if unknown := sorted({str(t) for t in types} - letters.keys()):
            raise PatternError(
                f"indexer_types may hold 'full' and 'shared' only, found {', '.join(unknown)}"
            )
        return cls("".join(letters[t] for t in types))

    def to_indexer_types(self) -> list[str]:
        """Return the ``indexer_types`` that transformers and SGLang obey first; L is "full"."""
        return [_INDEXER_TYPES[SHARED if c == SHARED else FULL] for c in self.layers]

    @classmethod
    def from_freq(cls, num_layers: int, freq: int, offset: int | None = None) -> Pattern:
        """Make the pattern of upstream's ``index_topk_freq`` and ``index_skip_topk_offset``.

        Layer l is F where ``max(l - offset + 1, 0) % freq == 0``; without an offset SGLang uses
        ``max(l - 1, 0) % freq == 0``, so that layers 0 and 1 are both F. This is not the paper's
        uniform interleaving (that is offset 1). Source: ``dsa_layer_skips_topk`` in
        ``sglang/srt/configs/model_config.py``.
        """
        if freq < 1:
            raise PatternError(f"index_topk_freq must be at least 1, got {freq}")
        if offset is not None and offset < 1:
            raise PatternError(f"index_skip_topk_offset must be at least 1, got {offset}")
        first = 2 if offset is None else offset
        return cls(
            "".join(
                FULL if max(layer - first + 1, 0) % freq == 0 else SHARED
                for layer in range(num_layers)
            )
        )

    # -- fitting it to a model ----------------------------------------------------------------

    def check_length(self, num_layers: int) -> None:
        """Raise PatternError unless the pattern has one character per layer."""
        if len(self) != num_layers:
            difference = len(self) - num_layers
            raise PatternError(
                f"the pattern has {len(self)} characters and the model has {num_layers} indexer "
                f"layers: it is {abs(difference)} too {'long' if difference > 0 else 'short'}. "
                "Give one F or S per layer."
            )

    def check_checkpoint(self, shipped: Pattern) -> None:
        """Raise PatternError where this pattern needs an indexer that the checkpoint lacks.

        ``shipped`` is the checkpoint's own sharing. Its S layers ship no indexer weights, so they
        must stay S; its F layers may become S.
        """
        self.check_length(len(shipped))
        missing = [i for i in self.full_layers if not shipped.is_full(i)]
        if missing:
            letters = " and ".join(sorted({self.layers[i] for i in missing}))
            raise PatternError(
                f"layers {_join(missing)} are {letters} in the pattern, but this checkpoint ships "
                f"no indexer weights there (its own pattern is {shipped}). Make those layers S."
            )

    def check_stages(self, starts: Iterable[int]) -> None:
        """Raise PatternError where a pipeline stage would start without indices.

        Needed only where the engine does not ship indices from one stage to the next.
        """
        missing = [start for start in starts if not self.is_full(start)]
        if missing:
            raise PatternError(
                f"pipeline stages start at {_layers(missing)}, where the pattern has S: indices of "
                "the stage before do not reach it. Put F there, or move the stage boundaries "
                "(SGLANG_PP_LAYER_PARTITION)."
            )

    def check_unfolded(self, where: str) -> None:
        """Raise PatternError if this pattern folds, which ``where`` cannot."""
        if self.is_folded:
            raise PatternError(
                f"{self} folds indexers, which {where} cannot do yet. Name a pattern of F and S "
                "without +cN."
            )

    def _checked(self, layer: int) -> int:
        if not 0 <= layer < len(self):
            raise IndexError(f"layer {layer} of a {len(self)}-layer pattern")
        return layer


def split_suffix(text: str) -> tuple[str, Suffix]:
    """Split a pattern's suffix from the text before it.

    Args:
        text: a pattern, or any name of one such as ``1/4``, ``full+c4@MODEL.slopes``.

    Raises:
        PatternError: it ends in something that was meant as a suffix and is none.
    """
    name, slopes = text, ""
    if digest := _DIGEST.search(text):
        name, slopes = text[: digest.start()], digest[1]
    elif text.endswith(SLOPES_FILE) and "@" in text:
        name, _, slopes = text.partition("@")
    number = _FACTOR.search(name)
    factor = int(number[1]) if number else 1
    letters = name[: number.start()] if number else name
    if _LEFT_OVER.search(letters) or (number and not 1 < factor <= MOST_CANDIDATES):
        raise PatternError(
            f"candidates are written +cN behind the pattern, with N from 2 to {MOST_CANDIDATES} "
            f"lengths of a list (1 is the letter L), for example full+c4; got {quoted(text)}"
        )
    return letters, Suffix(factor, slopes)


def _check_layers(layers: str) -> None:
    """Raise the one PatternError that says what is wrong with an F/S string."""
    if not layers:
        raise PatternError("the pattern is empty. Give one F or S per layer.")
    valid = {FULL, SHARED, FOLDED}
    wrong = sorted(set(layers) - valid)
    if wrong:
        at = next(i for i, c in enumerate(layers) if c in wrong)
        hint = "Use capital letters." if set(layers.upper()) <= valid else "Only F, S and L."
        if any(c.isspace() for c in wrong):
            hint = "Remove the white space."
        characters = ", ".join(repr(c) for c in wrong)
        raise PatternError(f"the pattern contains {characters} (first at character {at}). {hint}")
    if layers[0] == SHARED:
        raise PatternError(
            "the pattern starts with S, but layer 0 has no earlier layer to take indices from. "
            "Make it F."
        )


def _check_folding(pattern: Pattern) -> None:
    """Raise PatternError for a suffix that would change nothing, or names no slopes."""
    suffix = pattern.suffix
    if suffix.factor > 1 and FULL not in pattern.layers:
        raise PatternError(
            f"+c{suffix.factor} is about F layers, and {pattern} has none. Leave it out."
        )
    if suffix.slopes and not pattern.is_folded:
        raise PatternError(
            f"{pattern} names slopes and folds no layer: only L layers, and F layers with +cN, do. "
            f"Leave @{suffix.slopes} out."
        )
    if suffix.slopes.endswith(SLOPES_FILE):
        raise PatternError(
            f"a pattern names slopes by their digest, not by a file: {quoted(str(pattern))}"
        )


def check_foldable(pattern: Pattern, slopes: Sequence[object], whose: str) -> None:
    """Raise PatternError where a layer is L and the slopes, one a layer, are None."""
    letters = enumerate(pattern.layers)
    if exact := [i for i, kind in letters if kind == FOLDED and slopes[i] is None]:
        raise PatternError(
            f"layer {exact[0]} folds badly by the slopes {whose} and stays exact, and is L in the "
            "pattern. Make it F."
        )


def _layers(layers: Sequence[int]) -> str:
    return f"layer{'' if len(layers) == 1 else 's'} {_join(layers)}"


def _join(layers: Iterable[int]) -> str:
    return ", ".join(str(layer) for layer in layers)
