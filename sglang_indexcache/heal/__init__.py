"""Training-aware IndexCache: distillation losses, model integration and a staged trainer.

Torch, transformers and accelerate only; SGLang is not needed to train, and the losses need torch
alone. `tests/test_structure.py` holds this.
"""
