"""The ways from SGLang's CUDA path into a kernel, closed: a reference is launched in its place.

A kernel without a reference names itself and fails.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from importlib.util import find_spec
from typing import Any

from tests.rehearsal.stage import card, graphs, registry
from tests.rehearsal.stage.registry import REFERENCES, Reference
from tests.rehearsal.stage.rounding import round_like_torch

_found: set[str] = set()


def find(name: str, arguments: tuple[Any, ...] = ()) -> Reference:
    """Return what stands for the kernel ``name``, to be launched, whatever sizes the name has.

    The log names each kernel once.

    Raises:
        NotImplementedError: there is no reference for it.
    """
    if name not in REFERENCES:
        name = re.sub(r"(_p?\d+)+(?=\.)", "", name)
    if name not in REFERENCES:
        raise NotImplementedError(f"no reference stands for the kernel {name}")
    reference = REFERENCES[name]
    if name not in _found:
        _found.add(name)
        print(f"the stage's first {name}", flush=True)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        registry.compiled_with = arguments
        return reference(*args, **kwargs)

    def launch(*args: Any, **kwargs: Any) -> Any:
        return card.mark(graphs.launch(kernel, *args, **kwargs))

    return launch


class _Compiled:
    """Return value of ``load_jit``: a module whose functions are references."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments

    def __getattr__(self, function: str) -> Reference:
        if function.startswith("__"):
            raise AttributeError(function)
        return find(f"jit:{self._arguments[0]}.{function}", self._arguments)


def _load_jit(*arguments: Any, **_: Any) -> _Compiled:
    return _Compiled(*arguments)


def install() -> None:
    """Close the ways into compiled code, before any of SGLang's modules imports one by name."""
    import sglang.kernels.jit.utils as utils
    import sglang.kernels.jit.utils.compile as compiling
    import sglang.kernels.jit.utils.compile.loader as loader
    import sglang.srt.utils.common as common
    import sglang.srt.utils.custom_op as custom_op

    loader.load_jit = compiling.load_jit = utils.load_jit = _load_jit
    # Behind torch's dispatcher the mode would not see what a custom op's body does.
    custom_op.register_custom_op = lambda fn=None, **_: fn or (lambda function: function)
    original = common.direct_register_custom_op

    def direct_register_custom_op(op_name: str, op_func: Any, *args: Any, **kwargs: Any) -> Any:
        card.PYTHON_OPS[f"sglang.{op_name}"] = op_func
        return original(op_name, op_func, *args, **kwargs)

    _replace_everywhere(original, direct_register_custom_op)
    card.KERNEL_OF[:] = [find]
    _let_triton_launch()


def stand_in() -> None:
    """Replace the Python functions that launch kernels; afterwards SGLang may be imported."""
    for name, function in REFERENCES.items():
        # What cannot travel to a card's machine nobody calls there.
        if ":" in name and not name.startswith("jit:") and find_spec(re.split("[.:]", name)[0]):
            _stand_in(name, function)


def _let_triton_launch() -> None:
    """Let a Triton kernel in its interpreter be one launch; nobody's stores are waited for."""
    import triton.language.extra.cuda as cuda_extra
    from triton.runtime import interpreter

    for name in ("gdc_wait", "gdc_launch_dependents"):
        if hasattr(cuda_extra, name):
            setattr(cuda_extra, name, lambda *_, **__: None)
    interpreter._convert_float = round_like_torch(interpreter._convert_float)
    run = interpreter.GridExecutor.__call__
    interpreter.GridExecutor.__call__ = lambda self, *args, **kwargs: card.mark(
        graphs.launch(run, self, *args, **kwargs)
    )


def _replace_everywhere(old: Any, new: Any) -> None:
    """Replace it in every module that has imported ``old`` by name."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None) or {}
        for name in [name for name, value in names.items() if value is old]:
            names[name] = new


def _stand_in(name: str, function: Reference) -> None:
    """Replace a Python function that launches a kernel.

    A reference that takes ``**rest`` gets its arguments by name, however the caller gave them.
    """
    module, attribute = name.split(":")
    holder = importlib.import_module(module)
    original = getattr(holder, attribute)
    parameters = inspect.signature(function).parameters.values()
    takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
    signature = inspect.signature(original) if takes_rest else None

    def call(*args: Any, **kwargs: Any) -> Any:
        if signature is not None:
            args, kwargs = (), dict(signature.bind(*args, **kwargs).arguments)
        return find(name)(*args, **kwargs)

    setattr(holder, attribute, call)
    _replace_everywhere(original, call)
