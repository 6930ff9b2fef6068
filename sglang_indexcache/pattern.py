"""The F/S pattern: which DSA layers keep their indexer, and whose indices the others reuse.

A pattern is a string over {F, S}, one character per attention layer with an indexer. An F (full)
layer runs its indexer; an S (shared) layer has none and reuses the top-k indices of the nearest
earlier F layer (paper section "Method", ``f(l) = max{j < l : c_j = F}``). Layers are counted
from 0 here, as in SGLang and transformers; the paper counts from 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from hashlib import sha256
from itertools import pairwise

from sglang_indexcache.errors import PatternError

FULL = "F"
SHARED = "S"

_INDEXER_TYPES = {FULL: "full", SHARED: "shared"}


@dataclass(frozen=True)
class Pattern:
    """An immutable, valid pattern.

    ``str(pattern)`` is the F/S string, ``len(pattern)`` the number of layers.

    Raises:
        PatternError: on construction, if ``text`` is not a pattern.
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise PatternError(f"a pattern is a string of F and S, got {type(self.text).__name__}")
        _check_letters(self.text)

    # -- reading it ---------------------------------------------------------------------------

    def __str__(self) -> str:
        return self.text

    def __len__(self) -> int:
        return len(self.text)

    def is_full(self, layer: int) -> bool:
        """Return whether ``layer`` is F: it runs its own indexer."""
        return self.text[self._checked(layer)] == FULL

    @cached_property
    def full_layers(self) -> tuple[int, ...]:
        """The F layers, ascending."""
        return tuple(i for i, c in enumerate(self.text) if c == FULL)

    @cached_property
    def shared_layers(self) -> tuple[int, ...]:
        """The S layers, ascending."""
        return tuple(i for i, c in enumerate(self.text) if c == SHARED)

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Layer whose indices each layer uses: itself if F, else the nearest earlier F layer."""
        result: list[int] = []
        for layer, kind in enumerate(self.text):
            result.append(result[-1] if kind == SHARED else layer)
        return tuple(result)

    def source_of(self, layer: int) -> int:
        """Return the F layer whose indices ``layer`` uses."""
        return self.sources[self._checked(layer)]

    @cached_property
    def groups(self) -> tuple[range, ...]:
        """Runs of layers that share one set of indices, which their first layer selects."""
        bounds = [*self.full_layers, len(self)]
        return tuple(range(start, end) for start, end in pairwise(bounds))

    @property
    def retention(self) -> Fraction:
        """Share of layers that keep their indexer, as an exact fraction."""
        return Fraction(len(self.full_layers), len(self))

    @property
    def digest(self) -> str:
        """Digest of twelve hex digits, for keys in which the pattern's text would be too long."""
        return sha256(self.text.encode()).hexdigest()[:12]

    def summary(self) -> str:
        """Return one phrase: ``12 of 47 layers keep their indexer (25.5 %)``."""
        full, total = len(self.full_layers), len(self)
        return f"{full} of {total} layers keep their indexer ({100 * full / total:.1f} %)"

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
        """Return the ``indexer_types`` that transformers and SGLang obey first."""
        return [_INDEXER_TYPES[c] for c in self.text]

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
        """Raise PatternError if this pattern needs an indexer that the checkpoint lacks.

        ``shipped`` is the checkpoint's own sharing. Its S layers ship no indexer weights, so they
        must stay S; its F layers may become S.
        """
        self.check_length(len(shipped))
        missing = [i for i in self.full_layers if not shipped.is_full(i)]
        if missing:
            raise PatternError(
                f"layers {_join(missing)} are F in the pattern, but this checkpoint ships no "
                f"indexer weights there (its own pattern is {shipped}). Make those layers S."
            )

    def check_stages(self, starts: Iterable[int]) -> None:
        """Raise PatternError if a pipeline stage would start without indices.

        Needed only where the engine does not ship indices from one stage to the next.
        """
        missing = [start for start in starts if not self.is_full(start)]
        if missing:
            raise PatternError(
                f"pipeline stages start at {_layers(missing)}, where the pattern has S: indices of "
                "the stage before do not reach it. Put F there, or move the stage boundaries "
                "(SGLANG_PP_LAYER_PARTITION)."
            )

    def _checked(self, layer: int) -> int:
        if not 0 <= layer < len(self):
            raise IndexError(f"layer {layer} of a {len(self)}-layer pattern")
        return layer


def _check_letters(layers: str) -> None:
    """Raise PatternError, with the cause, unless ``text`` is a valid F/S string."""
    if not layers:
        raise PatternError("the pattern is empty. Give one F or S per layer.")
    wrong = sorted(set(layers) - {FULL, SHARED})
    if wrong:
        at = next(i for i, c in enumerate(layers) if c in wrong)
        hint = "Use capital letters." if set(layers.upper()) <= {FULL, SHARED} else "Only F and S."
        if any(c.isspace() for c in wrong):
            hint = "Remove the white space."
        characters = ", ".join(repr(c) for c in wrong)
        raise PatternError(f"the pattern contains {characters} (first at character {at}). {hint}")
    if layers[0] == SHARED:
        raise PatternError(
            "the pattern starts with S, but layer 0 has no earlier layer to take indices from. "
            "Make it F."
        )


def _layers(layers: Sequence[int]) -> str:
    return f"layer{'' if len(layers) == 1 else 's'} {_join(layers)}"


def _join(layers: Iterable[int]) -> str:
    return ", ".join(str(layer) for layer in layers)
