"""Fresh random inputs for every run, reproducible from the printed seed."""

import os
from random import randrange

import numpy as np
import pytest
import torch


@pytest.fixture
def seed() -> int:
    chosen = int(os.environ.get("INDEXCACHE_TEST_SEED", randrange(2**31)))
    print(f"INDEXCACHE_TEST_SEED={chosen}")
    return chosen


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)
