"""Random inputs from the run's seed."""

import numpy as np
import pytest
import torch


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)
