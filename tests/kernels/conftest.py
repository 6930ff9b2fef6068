"""Fresh random inputs for every run, reproducible from the printed seed."""

import os
import random

import pytest
import torch


@pytest.fixture
def generator(record_property: object) -> torch.Generator:
    seed = int(os.environ.get("INDEXCACHE_TEST_SEED", random.randrange(2**31)))
    print(f"INDEXCACHE_TEST_SEED={seed}")
    return torch.Generator().manual_seed(seed)
