"""Healing: train the indexers that a pattern keeps, on a frozen model.

Healing needs torch and transformers, but not SGLang; the losses need only torch.
"""

STEPS = 320
"""Default number of optimiser steps, all of them dense."""
