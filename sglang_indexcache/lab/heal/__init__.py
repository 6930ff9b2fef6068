"""Healing: train the indexers that a pattern keeps, on a frozen model.

Torch and transformers only; SGLang is not needed, and the losses need torch alone.
"""

STEPS = 320
"""Optimiser steps, if nothing else is asked; all of them dense."""
