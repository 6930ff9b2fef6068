"""Fresh random inputs in every run; a failure prints the seed that made them."""

from __future__ import annotations

import os
import random

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> int:
    value = int(os.environ.get("TRAINING_TEST_SEED", random.randrange(2**31)))
    print(f"TRAINING_TEST_SEED={value}")
    torch.manual_seed(value)
    random.seed(value)
    return value
