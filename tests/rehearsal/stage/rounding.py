"""Rounding of Triton's interpreter on the stage.

A module of its own, for importing `launches` makes the whole process believe in a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def round_like_torch(original: Any) -> Any:
    """Round float32 to fewer bits as a card does.

    Where a value rounds up to a power of two, Triton's interpreter loses the carry: 31.4 becomes
    16 in e4m3.
    """
    rounded = {"fp8e4nv": torch.float8_e4m3fn, "bf16": torch.bfloat16}

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.name != "fp32" or target.name not in rounded:
            return original(data, source, target, rounding)
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
            values = torch.from_numpy(np.array(data, np.float32)).to(rounded[target.name])
            bits = values.view(torch.uint8 if values.itemsize == 1 else torch.int16).numpy()
        return bits.view(f"uint{8 * values.itemsize}")

    return convert
