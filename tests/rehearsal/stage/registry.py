"""The references by the names of the kernels that they stand for; importing it changes nothing.

A name says by which way a kernel is reached:

* ``jit:<module>.<function>``: what SGLang compiles at run time, all through ``load_jit``;
* ``sgl_kernel.<op>``, ``deep_gemm.<op>``: a custom op of a wheel, seen by the mode of ``card``;
* ``<module>:<function>``: a Python function of a wheel or of SGLang that launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Reference = Callable[..., Any]
REFERENCES: dict[str, Reference] = {}

compiled_with: tuple[Any, ...] = ()
"""The arguments with which the kernel that runs now was compiled, such as ``"true"`` for neox."""


def reference(*names: str) -> Callable[[Reference], Reference]:
    """Let a function stand for the kernels ``names``."""

    def keep(function: Reference) -> Reference:
        REFERENCES.update(dict.fromkeys(names, function))
        return function

    return keep


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill what a kernel leaves undefined with what nobody may read: NaN, or a wild index."""
    return tensor.fill_(float("nan") if tensor.is_floating_point() else -(2**30))
