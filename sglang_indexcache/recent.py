"""The recent window in plain torch: a list of selected tokens, and those of the last w it lacks.

What transformers and the CPU platform run, and what the CUDA kernel (``kernels/window.py``) is
held against.
"""

from __future__ import annotations

import torch

NOTHING = -1
"""An entry of a list that names no token, as ``kernels.contract.PADDING``."""


def last_tokens(visible: torch.Tensor, windows: torch.Tensor | int, width: int) -> torch.Tensor:
    """The last tokens that each row may see, the newest first.

    Args:
        visible: ``[...]`` integers: how many tokens of its request each row sees, its own included.
            A row that sees none gets none.
        windows: how many of them are wanted, for all rows or ``[...]`` for each.
        width: the widest window.

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
    order = (both == NOTHING).to(torch.int8).argsort(dim=-1, stable=True)
    return both.gather(-1, order)
