"""What a search may touch: which layers may lose their indexer, and which must."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sglang_indexcache.errors import SearchError
from sglang_indexcache.pattern import Pattern


@dataclass(frozen=True)
class Constraints:
    """The rules of one search.

    Attributes:
        start: where it begins: the checkpoint's own sharing, with the layers forced to S.
        fixed: F layers that may not be flipped: layer 0, forced F layers, pipeline stage starts.
    """

    start: Pattern
    fixed: frozenset[int]

    @classmethod
    def make(
        cls,
        own: Pattern,
        keep_full: Iterable[int] = (),
        force_shared: Iterable[int] = (),
        stage_starts: Iterable[int] = (),
    ) -> Constraints:
        """Combine the rules.

        Args:
            own: the checkpoint's own sharing; its S layers have no indexer and stay S.
            keep_full: layers that must stay F.
            force_shared: layers that must be S.
            stage_starts: first layers of pipeline stages, which must stay F.

        Raises:
            SearchError: rules that contradict each other or name layers that do not exist.
        """
        kept, shared = {0, *keep_full, *stage_starts}, set(force_shared)
        outside = sorted(layer for layer in kept | shared if not 0 <= layer < len(own))
        if outside:
            raise SearchError(f"layers {outside} do not exist in a {len(own)}-layer model")
        if both := sorted(kept & shared):
            raise SearchError(
                f"layers {both} are forced both to F and to S (layer 0 and the first layer of "
                "each pipeline stage are always F)"
            )
        if missing := sorted(layer for layer in kept if not own.is_full(layer)):
            raise SearchError(
                f"layers {missing} are forced to F, but the checkpoint ships no indexer there"
            )
        full = set(own.full_layers) - shared
        return cls(Pattern.from_layers(len(own), full), frozenset(kept))

    @property
    def fewest(self) -> int:
        """F layers that no search can go below."""
        return len(self.fixed)

    def candidates(self, pattern: Pattern) -> list[int]:
        """F layers of ``pattern`` that may become S, ascending."""
        return [layer for layer in pattern.full_layers if layer not in self.fixed]

    def restorable(self, pattern: Pattern) -> list[int]:
        """S layers of ``pattern`` that may become F again, ascending."""
        return [layer for layer in pattern.shared_layers if self.start.is_full(layer)]


def flipped(pattern: Pattern, layer: int) -> Pattern:
    """``pattern`` with F and S exchanged at ``layer`` (the paper's ``c|_{c_l -> S}``)."""
    return Pattern.from_layers(len(pattern), set(pattern.full_layers) ^ {layer})


def exchanged(pattern: Pattern, out: int, into: int) -> Pattern:
    """``pattern`` with F layer ``out`` made S and S layer ``into`` made F."""
    return Pattern.from_layers(len(pattern), set(pattern.full_layers) - {out} | {into})


def baselines(full_layers: int, constraints: Constraints) -> dict[str, Pattern]:
    """The blind schedules with this many F layers that the constraints allow, by name.

    ``uniform`` is the paper's interleaving where a ratio 1/r gives this count, and the F layers
    spread as evenly as integers allow otherwise. ``freq`` is SGLang's ``index_topk_freq`` without
    an offset, where some frequency gives this count.
    """
    count, most = len(constraints.start), set(constraints.start.full_layers)
    spread = Pattern.from_layers(count, (i * count // full_layers for i in range(full_layers)))
    found = {"uniform": spread}
    for name, schedule in (("uniform", Pattern.uniform), ("freq", Pattern.from_freq)):
        every = (schedule(count, freq) for freq in range(1, count + 1))
        if fitting := next((p for p in every if len(p.full_layers) == full_layers), None):
            found[name] = fitting
    return {name: p for name, p in found.items() if constraints.fixed <= {*p.full_layers} <= most}


def stage_starts(num_layers: int, stages: int) -> tuple[int, ...]:
    """First layers of ``stages`` pipeline stages of even size, the longer ones first.

    Raises:
        SearchError: more stages than layers, or fewer than one.
    """
    if not 1 <= stages <= num_layers:
        raise SearchError(f"{num_layers} layers cannot be cut into {stages} blocks")
    size, longer = divmod(num_layers, stages)
    return tuple(stage * size + min(stage, longer) for stage in range(stages))


def parse_layers(text: str) -> list[int]:
    """``3,5,10-12`` as numbers.

    Raises:
        SearchError: anything else.
    """
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise SearchError(f"{text!r} is not a list of layers such as 3,5,10-12")
        found += range(int(first), int(last or first) + 1)
    return found
