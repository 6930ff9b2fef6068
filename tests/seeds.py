"""The seed of everything that a test draws.

A run of the tests draws nothing fresh: ``FIXED`` unless the environment says otherwise, which
``make soak`` does. Seeds that were given to ``random.Random``, ``default_rng`` or ``manual_seed``
as constants are constants in a soak, too.
"""

from __future__ import annotations

import os
import random
import sys

VARIABLE = "INDEXCACHE_TEST_SEED"
FIXED = 20261123
SEED = int(os.environ.get(VARIABLE, FIXED))
"""Below 2**32, numpy's limit."""


def seed_all(seed: int = SEED) -> None:
    """Seed the generators that a test may draw from without naming one."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
