"""The attention backend for NVIDIA GPUs."""
