"""Answer for GPUs that this machine does not have, so that SGLang resolves flags as on their node.

Only ``server doctor`` does so, in a process that computes nothing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

GPUS = 8
"""GPUs of a node."""


@dataclass(frozen=True)
class Card:
    """Answers to what SGLang asks of a GPU before it loads a model; ``memory`` in bytes."""

    name: str
    capability: tuple[int, int]
    memory: int


CARDS = {
    "h100": Card("NVIDIA H100 80GB HBM3", (9, 0), 81559 << 20),
    "h200": Card("NVIDIA H200", (9, 0), 143771 << 20),
    "b200": Card("NVIDIA B200", (10, 0), 183359 << 20),
}


def stand_in(card: Card) -> None:
    """Let PyTorch say that this machine has a node's GPUs; to be called before SGLang is imported.

    ``sgl_kernel`` cannot be imported without a driver, so its names are there and do nothing.
    """
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": GPUS,
        "get_device_capability": card.capability,
        "get_device_name": card.name,
        "mem_get_info": (card.memory, card.memory),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, _always(answer))
    torch.accelerator.is_available = _always(True)
    sys.meta_path.insert(0, _Names())


def _always(answer: Any) -> Any:
    return lambda *_args, **_kwargs: answer


class _Name(ModuleType):
    """A module, or anything in one."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # so that modules below it are looked for

    def __getattr__(self, name: str) -> _Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self.__name__}.{name}")

    def __call__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError(f"{self.__name__} needs a GPU, and this machine has none")


class _Names(MetaPathFinder, Loader):
    """Finds :class:`_Name` for ``sgl_kernel`` and all below it."""

    def find_spec(self, fullname: str, _path: Any, _target: Any = None) -> ModuleSpec | None:
        ours = fullname.partition(".")[0] == "sgl_kernel"
        return ModuleSpec(fullname, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Name(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: there is no code to run."""
