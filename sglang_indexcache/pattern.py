"""The F/S pattern: which DSA layers keep their indexer, and whose indices the others reuse.

A pattern is a string over {F, S}, one character per attention layer with an indexer. An F (full)
layer runs its indexer; an S (shared) layer has none and reuses the top-k indices of the nearest
earlier F layer (paper section "Method", ``f(l) = max{j < l : c_j = F}``). Layers are counted
from 0 here, as in SGLang and transformers; the paper counts from 1.

A pattern may end in a recent window, ``FSSS+w8``: its S layers see, besides what their F layer
selected, the last 8 tokens. The window is part of the pattern wherever one is named or compared.
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
WIDEST_WINDOW = 1024
"""Tokens; half of the list of a released model."""

_INDEXER_TYPES = {FULL: "full", SHARED: "shared"}
_WINDOW = re.compile(r"(.*)\+w([1-9][0-9]{0,3})", re.DOTALL)


@dataclass(frozen=True)
class Group:
    """An F layer and the layers that use its indices, itself included."""

    source: int
    layers: range


@dataclass(frozen=True)
class Pattern:
    """An immutable, valid pattern.

    ``str(pattern)`` is the F/S string, behind it the window if there is one; ``len(pattern)`` is
    the number of layers.

    Raises:
        PatternError: on construction, if ``text`` is not a pattern.
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise PatternError(f"a pattern is a string of F and S, got {type(self.text).__name__}")
        _check_layers(self.layers)

    # -- reading it ---------------------------------------------------------------------------

    def __str__(self) -> str:
        return self.text

    def __len__(self) -> int:
        return len(self.layers)

    @cached_property
    def layers(self) -> str:
        """The F/S string alone, one character per layer."""
        return split_window(self.text)[0]

    @cached_property
    def window(self) -> int:
        """How many of the last tokens, a row's own included, S layers see anyway; 0 without."""
        return split_window(self.text)[1]

    def window_at(self, layer: int) -> int:
        """How many of the last tokens ``layer`` sees besides what was selected for it.

        F layers see their own selection. Only where no layer is S do all of them see the window:
        such a pattern is the control that shows what the window does by itself.
        """
        return 0 if self.shared_layers and self.is_full(layer) else self.window

    def with_window(self, window: int) -> Pattern:
        """This pattern with a recent window of ``window`` tokens in place of its own; 0: none."""
        return Pattern(f"{self.layers}+w{window}" if window else self.layers)

    def is_full(self, layer: int) -> bool:
        """Whether ``layer`` runs its own indexer."""
        return self.layers[self._checked(layer)] == FULL

    @cached_property
    def full_layers(self) -> tuple[int, ...]:
        """The F layers, ascending."""
        return tuple(i for i, c in enumerate(self.layers) if c == FULL)

    @cached_property
    def shared_layers(self) -> tuple[int, ...]:
        """The S layers, ascending."""
        return tuple(i for i, c in enumerate(self.layers) if c == SHARED)

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """For every layer the F layer whose indices it uses; an F layer uses its own."""
        result: list[int] = []
        for layer, kind in enumerate(self.layers):
            result.append(layer if kind == FULL else result[-1])
        return tuple(result)

    def source_of(self, layer: int) -> int:
        """The F layer whose indices ``layer`` uses."""
        return self.sources[self._checked(layer)]

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The pattern cut into runs that share one set of indices."""
        bounds = [*self.full_layers, len(self)]
        return tuple(Group(start, range(start, end)) for start, end in pairwise(bounds))

    @property
    def retention(self) -> Fraction:
        """F layers over all layers, exactly."""
        return Fraction(len(self.full_layers), len(self))

    @property
    def digest(self) -> str:
        """Twelve hex digits that stand for the pattern where its text is too long, as in a key."""
        return sha256(self.text.encode()).hexdigest()[:12]

    def summary(self) -> str:
        """One phrase for logs and tables: ``12 of 47 layers keep their indexer (25.5 %)``."""
        kept, total = len(self.full_layers), len(self)
        told = f"{kept} of {total} layers keep their indexer ({100 * kept / total:.1f} %)"
        if not self.window:
            return told
        who = "S layers" if self.shared_layers else "as a control, all of them"
        return f"{told}; {who} also see the last {self.window} tokens"

    # -- making it ----------------------------------------------------------------------------

    @classmethod
    def full(cls, num_layers: int) -> Pattern:
        """Every layer F: plain DSA."""
        return cls(FULL * num_layers)

    @classmethod
    def uniform(cls, num_layers: int, ratio: int) -> Pattern:
        """The paper's uniform interleaving at retention 1/``ratio``: F, then ratio-1 times S."""
        if ratio < 1:
            raise PatternError(
                f"uniform interleaving keeps 1/r of the indexers, r >= 1; got {ratio}"
            )
        return cls("".join(FULL if i % ratio == 0 else SHARED for i in range(num_layers)))

    @classmethod
    def from_layers(cls, num_layers: int, full_layers: Iterable[int]) -> Pattern:
        """The pattern whose F layers are ``full_layers``."""
        kept = set(full_layers)
        if outside := sorted(kept - set(range(num_layers))):
            raise PatternError(
                f"layers {_join(outside)} do not exist in a {num_layers}-layer model"
            )
        return cls("".join(FULL if i in kept else SHARED for i in range(num_layers)))

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
        """The ``indexer_types`` list that transformers and SGLang obey first."""
        return [_INDEXER_TYPES[c] for c in self.layers]

    @classmethod
    def from_freq(cls, num_layers: int, freq: int, offset: int | None = None) -> Pattern:
        """Upstream's ``index_topk_freq`` with ``index_skip_topk_offset``.

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

    def check_checkpoint(self, own: Pattern) -> None:
        """Raise PatternError where this pattern needs an indexer that the checkpoint lacks.

        ``own`` is the checkpoint's own sharing. Its S layers ship no indexer weights, so they
        must stay S; its F layers may become S.
        """
        self.check_length(len(own))
        missing = [i for i in self.full_layers if not own.is_full(i)]
        if missing:
            raise PatternError(
                f"layers {_join(missing)} are F in the pattern, but this checkpoint ships no "
                f"indexer weights there (its own pattern is {own}). Make those layers S."
            )

    def check_stages(self, starts: Iterable[int]) -> None:
        """Raise PatternError where a pipeline stage would start without indices.

        Needed only where the engine does not ship indices from one stage to the next.
        """
        missing = [start for start in starts if not self.is_full(start)]
        if missing:
            raise PatternError(
                f"pipeline stages start at layers {_join(missing)}, which are S: the indices of "
                "the stage before do not reach them. Make those layers F or move the stage "
                "boundaries (SGLANG_PP_LAYER_PARTITION)."
            )

    def _checked(self, layer: int) -> int:
        if not 0 <= layer < len(self):
            raise IndexError(f"layer {layer} of a {len(self)}-layer pattern")
        return layer


def split_window(text: str) -> tuple[str, int]:
    """What stands before a pattern's window, and the window; 0 if there is none.

    Args:
        text: a pattern, or any name of one such as ``1/4+w8``.

    Raises:
        PatternError: it ends in something that was meant as a window and is none.
    """
    if found := _WINDOW.fullmatch(text):
        if (window := int(found[2])) <= WIDEST_WINDOW:
            return found[1], window
    elif not re.search(r"\+w?\d*$", text):
        return text, 0
    raise PatternError(
        f"a recent window is written +wN behind the pattern, with N from 1 to {WIDEST_WINDOW} "
        f"tokens, for example 1/4+w8; got {quoted(text)}"
    )


def _check_layers(layers: str) -> None:
    """Raise the one PatternError that says what is wrong with an F/S string."""
    if not layers:
        raise PatternError("the pattern is empty. Give one F or S per layer.")
    wrong = sorted(set(layers) - {FULL, SHARED})
    if wrong:
        at = next(i for i, c in enumerate(layers) if c in wrong)
        hint = "Use capital letters." if set(layers.upper()) <= {FULL, SHARED} else "Only F and S."
        if any(c.isspace() for c in wrong):
            hint = "Remove the white space."
        shown = ", ".join(repr(c) for c in wrong)
        raise PatternError(f"the pattern contains {shown} (first at character {at}). {hint}")
    if layers[0] != FULL:
        raise PatternError(
            "the pattern starts with S, but layer 0 has no earlier layer to take indices from. "
            "Make it F."
        )


def _join(layers: Iterable[int]) -> str:
    return ", ".join(str(layer) for layer in layers)
