"""Training-aware IndexCache: distillation losses, model integration and a staged trainer.

Torch, transformers and accelerate only; SGLang is not needed to train.
"""
