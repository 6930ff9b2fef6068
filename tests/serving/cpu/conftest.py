"""The kernels' random inputs."""

from tests.kernels.conftest import generator

__all__ = ["generator"]
