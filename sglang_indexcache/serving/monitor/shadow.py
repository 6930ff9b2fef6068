"""Layers' own lists beside those that they get by sharing, on a sample of forwards.

Live mode keeps every layer's index keys, so on a few rows of a forward an S layer's own indexer can
score them too, once the forward has its list. Static mode has no indexer there; each F layer's list
is held against that of the F layer before it, which costs no score. A shadow reads what a forward
made and writes nothing that a forward reads. docs/drift.md says which forwards have none.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.monitor.traffic import Served

if TYPE_CHECKING:
    from sglang_indexcache.serving.plan import Plan

logger = logging.getLogger(__name__)

ROWS = 16
"""Rows sampled of a forward, at most."""
SUMS = 4
"""Added up by layer: the rows that the sampled ones stand for, and over them, from 0 to 1, the
overlap, that by chance and the recall. Without weights a decode's row, which sees most and is never
left out, would count more than a long prefill's."""
_KEY_BLOCK = 8192
"""Keys scored at a time: with 64 heads and all rows that is 32 MB."""

Queries = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Of rows ``[R]`` int64: index queries ``[R, H, D]`` and weights of the heads ``[R, H]``, float32,
all scales in them."""
Keys = Callable[["Part", int, int], torch.Tensor]
"""Index keys ``[n, D]`` float32 of a request's tokens, from and to below."""
Entries = Callable[["Part"], torch.Tensor]
"""``[visible]`` integers: how the lists of a forward name the tokens of a request."""


@dataclass(frozen=True)
class Part:
    """The sampled rows of one request of a forward, ascending.

    Attributes:
        sees: how many tokens each of them may attend to, more than index_topk.
        weight: how many rows of the forward each stands for.
    """

    request: int
    rows: tuple[int, ...]
    sees: tuple[int, ...]
    pattern: Pattern
    weight: float


class Shadow:
    """The samples of a process; its sums stay on the device until somebody reads them.

    Of ``one_in`` forwards one is sampled, by lot; 0 for none. ``parts`` is what is sampled of the
    forward in progress, ``patterns`` the server's, whose sums these are.
    """

    def __init__(self, plan: Plan) -> None:
        self.one_in, self.forwards = plan.shadow, 0
        self.parts: tuple[Part, ...] = ()
        self._is_static, self._layers = plan.mode == "static", len(plan.pattern)
        # Of its own: a draw from torch's would change what requests draw. All ranks draw alike.
        self._lots = random.Random(0)
        self._topk, self._rows, self._is_new = 0, 0, False
        self.patterns: tuple[Pattern, ...] = ()
        self._sums: torch.Tensor | None = None
        self._before = torch.empty(0)

    def begin(self, served: Sequence[Served], patterns: tuple[Pattern, ...], topk: int) -> None:
        """Begin a forward of these requests: draw whether it is sampled, and which rows.

        Left out are requests of other patterns than the server's, or the sums of a layer would be
        about several lists, and rows that see no more than ``topk`` tokens: they select all.
        """
        self.parts = ()
        if not self.one_in or self._lots.randrange(self.one_in):
            return
        if patterns != self.patterns:  # now layers have other lists
            self.patterns = patterns
            if self._sums is not None:
                self._before = self._sums.clone()
        self.parts = tuple(draw(served, patterns, topk, self._lots))
        self._topk, self._rows = topk, sum(rows for _, rows, _ in served)
        self._is_new = bool(self.parts)

    def skip(self) -> None:
        """Leave out the forward that has begun, which is captured or replayed."""
        self.parts = ()

    def look(
        self,
        layer: int,
        lists: torch.Tensor | None,
        entries: Entries,
        *,
        own: torch.Tensor | None = None,
        queries: Queries | None = None,
        keys: Keys | None = None,
    ) -> None:
        """Compare, if the forward is sampled; what goes wrong ends the shadow and nothing else.

        Args:
            layer: pattern position.
            lists: ``[T, k]`` integers as ``entries`` has them: what the layer was given, in static
                mode what it would be given.
            own: static mode: ``[T, k]``, what the layer selected itself.
            queries: live mode, as ``keys``: of the layer's indexer and cache.
        """
        parts = [part for part in self.parts if part.pattern.is_full(layer) == self._is_static]
        # Where ranks share the rows of a prompt, a list's place is not a row's number.
        if not parts or lists is None or lists.shape[0] < self._rows:
            return
        if lists.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        try:
            rows = torch.tensor([row for part in parts for row in part.rows], device=lists.device)
            scoring = queries(rows) if queries else None
            start = 0
            for part in parts:
                span, start = slice(start, start + len(part.rows)), start + len(part.rows)
                sees = torch.tensor(part.sees, device=lists.device)
                tokens = entries(part)
                scores = None
                if scoring is not None and keys is not None:
                    scores = score(scoring[0][span], scoring[1][span], part, keys)
                    selection = best(scores, sees, self._topk)
                else:
                    assert own is not None, "either an indexer or its list is there"
                    selection = holds(own[rows[span]], tokens, sees)
                shared = holds(lists[rows[span]], tokens, sees)
                self._add(layer, part, compare(shared, selection, sees, scores))
        except Exception:  # inside a forward: it would end the server
            logger.exception("IndexCache: --indexcache-shadow stops here")
            self.one_in, self.parts = 0, ()

    def read(self) -> tuple[list[list[float]], list[list[float]]]:
        """Return the sums since the server's pattern was set, and those since the start.

        Both are ``[layers][SUMS]``. Waits for the device, so read it seldom.
        """
        if self._sums is None:
            return [], []
        if self._sums.is_cuda:
            torch.cuda.synchronize()  # forwards add to them on a stream of their own
        return (self._sums - self._before).tolist(), self._sums.tolist()

    def _add(self, layer: int, part: Part, shares: torch.Tensor) -> None:
        """Add the ``shares`` ``[R, SUMS]`` of a part's rows to the layer's sums."""
        if self._sums is None:
            self._sums = shares.new_zeros(self._layers, SUMS)
            self._before = self._sums.clone()
        self.forwards += self._is_new
        self._is_new = False
        self._sums[layer] += part.weight * shares.sum(0)


def draw(
    served: Sequence[Served], patterns: Sequence[Pattern], topk: int, lots: random.Random
) -> Iterator[Part]:
    """Draw at most :data:`ROWS` of the rows that see more than ``topk`` tokens, each as likely."""
    spans: list[tuple[int, int, int, int]] = []  # request, first row, rows, what the first sees
    first = 0
    for request, (pattern, rows, length) in enumerate(served):
        sees = length - rows + 1
        short = min(rows, max(0, topk + 1 - sees))
        if pattern in patterns:
            spans.append((request, first + short, rows - short, sees + short))
        first += rows
    total = sum(count for _, _, count, _ in spans)
    samples = sorted(lots.sample(range(total), min(ROWS, total)))
    before = 0
    for request, first, count, sees in spans:
        offsets = [n - before for n in samples if before <= n < before + count]
        before += count
        if offsets:
            rows_of, sees_of = (tuple(start + n for n in offsets) for start in (first, sees))
            yield Part(request, rows_of, sees_of, served[request][0], total / len(samples))


def score(queries: torch.Tensor, weights: torch.Tensor, part: Part, keys: Keys) -> torch.Tensor:
    """Return ``[R, n]`` float32 index scores of a request's rows, n what the last of them sees."""
    total = max(part.sees)
    blocks = []
    for low in range(0, total, _KEY_BLOCK):
        products = queries @ keys(part, low, min(total, low + _KEY_BLOCK)).T
        blocks.append((weights[:, :, None] * products.relu_()).sum(1))
    return torch.cat(blocks, dim=1)


def best(scores: torch.Tensor, sees: torch.Tensor, topk: int) -> torch.Tensor:
    """Return ``[R, n]`` bool: the k best of what each row sees, the first of equals."""
    hidden = scores.masked_fill(~_visible(sees, scores.shape[1]), -torch.inf)
    order = hidden.sort(dim=1, descending=True, stable=True).indices[:, :topk]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, value=True)


def holds(lists: torch.Tensor, tokens: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
    """Return ``[R, n]`` bool: which of ``tokens`` ``[n]`` each of ``lists`` ``[R, k]`` has."""
    ordered = lists.sort(dim=1).values
    targets = tokens.to(ordered.dtype).expand(len(lists), -1).contiguous()
    places = torch.searchsorted(ordered, targets).clamp_max(ordered.shape[1] - 1)
    return (ordered.gather(1, places) == targets) & _visible(sees, len(tokens))


def compare(
    shared: torch.Tensor,
    selection: torch.Tensor,
    sees: torch.Tensor,
    scores: torch.Tensor | None,
) -> torch.Tensor:
    """Return ``[R, SUMS]`` float64: 1 for the row, and its shares.

    The overlap is the share of ``selection`` ``[R, n]``, the layer's own selection, that ``shared``
    ``[R, n]``, the list that it is given, has; chance that of as many tokens drawn blindly. The
    recall, 0 without scores ``[R, n]``, weights the overlap by the softmax of each row's scores,
    which indexers are trained to make that of attention.
    """
    shares = [
        torch.ones(len(shared), device=shared.device),
        (shared & selection).sum(1) / selection.sum(1),
    ]
    shares.append(shared.sum(1) / sees)
    if scores is None:
        shares.append(torch.zeros_like(shares[0]))
    else:
        visible = _visible(sees, shared.shape[1])
        mass = scores.masked_fill(~visible, -torch.inf).softmax(1) * selection
        shares.append((mass * shared).sum(1) / mass.sum(1))
    return torch.stack(shares, dim=1).double()


def _visible(sees: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``[R, count]`` bool: which tokens each row may attend to."""
    return torch.arange(count, device=sees.device) < sees[:, None]
