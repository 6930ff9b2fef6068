"""The recent window in plain torch: a list of selected tokens, and those of the last w it lacks.

What transformers and the CPU platform run, and what the CUDA kernel is held against
(``kernels/window.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

NOTHING = -1
"""An entry of a list that names no token, as ``kernels.contract.PADDING``."""


def last_tokens(visible: torch.Tensor, windows: torch.Tensor | int, width: int) -> torch.Tensor:
    """Return the last tokens that each row may see, the newest first.

    Args:
        visible: ``[...]`` integers: how many tokens of its request each row sees, its own included.
            A row that sees none gets none.
        windows: how many of them are wanted, for all rows or ``[...]`` for each.

    Returns:
        ``[..., width]`` positions of ``visible``'s dtype, -1 behind the last.
    """
    back = torch.arange(width, device=visible.device, dtype=visible.dtype)
    wanted = windows[..., None] if isinstance(windows, torch.Tensor) else windows
    positions = visible[..., None] - 1 - back
    return torch.where((back < wanted) & (positions >= 0), positions, NOTHING)


def union(lists: torch.Tensor, recent: torch.Tensor) -> torch.Tensor:
    """Both together, each token once.

    Args:
        lists: ``[..., k]`` integers, what was selected; -1 for nothing.
        recent: ``[..., w]`` in the same terms, no token twice; -1 for nothing.

    Returns:
        ``[..., k + w]`` of ``lists``'s dtype: what was selected, as it stands there, then what it
        lacks of the recent, then -1. So a row's tokens lie together at its start.
    """
    held = torch.stack([(lists == one[..., None]).any(-1) for one in recent.unbind(-1)], dim=-1)
    both = torch.cat([lists, recent.to(lists.dtype).masked_fill(held, NOTHING)], dim=-1)
    width = both.shape[-1]
    is_one = both != NOTHING
    places = torch.where(is_one, is_one.cumsum(-1) - 1, width)  # the last column takes the rest
    wide = torch.full_like(pad(both, (0, 1)), NOTHING)
    return wide.scatter_(-1, places, both)[..., :width].contiguous()


@dataclass(frozen=True)
class Addresses:
    """Naming of a row's tokens in lists; positions in its request if neither form is given.

    Attributes:
        table: ``[R, L]`` int32, the pool slot of every token, with ``owners``.
        owners: ``[T]`` integers, each row's line of ``table``.
        offsets: ``[T]`` integers, where each row's request begins among tokens laid end to end.
    """

    table: torch.Tensor | None = None
    owners: torch.Tensor | None = None
    offsets: torch.Tensor | None = None

    def of(self, positions: torch.Tensor) -> torch.Tensor:
        """``[T, w]`` entries that name ``positions``, -1 where those are."""
        if self.table is not None and self.owners is not None:
            named = self.table[self.owners.long()[:, None], positions.clamp_min(0).long()]
        elif self.offsets is not None:
            named = positions + self.offsets[:, None]
        else:
            return positions
        return named.masked_fill(positions < 0, NOTHING)


def widen(
    lists: torch.Tensor,
    visible: torch.Tensor,
    windows: torch.Tensor | int,
    width: int,
    addresses: Addresses,
    multiple: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Extend lists by their rows' recent windows, in the form that attention kernels take.

    Args:
        lists: ``[T, k]`` int32 entries as ``addresses`` has them; -1 for nothing.
        visible: ``[T]`` integers: how many tokens of its request each row sees.
        windows: how many of the last of them it sees anyway, one number or ``[T]``.
        multiple: of which the lists' new length is one.

    Returns:
        ``[T, n]`` int32, n at least k + width: each row's entries together at its start, then -1;
        and ``[T]`` int32, how many they are.
    """
    wide = union(lists, addresses.of(last_tokens(visible, windows, width)))
    missing = -wide.shape[1] % multiple
    return pad(wide, (0, missing), value=NOTHING), (wide >= 0).sum(-1, dtype=torch.int32)
