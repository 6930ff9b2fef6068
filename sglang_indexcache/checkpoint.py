"""Facts about a model that IndexCache needs, read from its HF config alone.

The config may be a transformers config object or the dict of a ``config.json``. This module imports
neither transformers nor SGLang.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_indexcache.errors import CheckpointError, IndexCacheError, PatternError
from sglang_indexcache.models import (
    BY_ARCHITECTURE,
    LAYER_COUNTS,
    SHAPE_FIELDS,
    TRAINABLE,
    Family,
    family_of,
)
from sglang_indexcache.models import read_field as _get
from sglang_indexcache.pattern import Pattern

CONFIG_FILE = "config.json"

QUANTISED = ("quantization_config", "compression_config")
"""Config keys under which a checkpoint says how its weights are quantised."""

MODELOPT_FILE = "hf_quant_config.json"
"""File beside the config in which NVIDIA's ModelOpt describes the quantisation."""

SHARING_KEYS = ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
"""Config keys by which upstream describes cross-layer sharing, strongest first."""

MOST_LAYERS = 4096
"""Largest number of layers that is accepted: a pattern has a character for each, and a config may
claim any number."""


def _is_number(value: Any) -> bool:
    return type(value) is int  # True and False are no numbers here


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 1


def _are_words(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(word, str) for word in value)


def _are_numbers(value: Any) -> bool:
    return value is None or (isinstance(value, (list, tuple)) and all(map(_is_number, value)))


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping) or hasattr(value, "to_dict")


_Form = tuple[Callable[[Any], bool], str]
_COUNT: _Form = (_is_count, "a whole number of at least 1")
_NUMBER: _Form = (_is_number, "a whole number")
_WORDS: _Form = (_are_words, "a list of words")
_WORD: _Form = (lambda value: isinstance(value, str), "a word")
_DTYPE: _Form = (  # a config object holds a torch.dtype
    lambda value: not isinstance(value, (bool, int, float, list, Mapping)),
    "a word",
)
_LAYERS: _Form = (
    lambda value: _is_count(value) and value <= MOST_LAYERS,
    f"a whole number from 1 to {MOST_LAYERS}",
)

FORMS: Mapping[str, _Form] = {
    "architectures": _WORDS,
    "model_type": _WORD,
    "dtype": _DTYPE,
    "torch_dtype": _DTYPE,
    "text_config": (_is_object, "an object with fields of its own"),
    "quantization_config": (
        lambda value: _is_object(value) and _are_numbers(_get(value, "weight_block_size")),
        "an object, whose weight_block_size are whole numbers",
    ),
    **dict.fromkeys(LAYER_COUNTS, _LAYERS),
    "indexer_types": _WORDS,
    "index_topk_pattern": (
        lambda value: isinstance(value, str) or _are_words(value),
        "a word, or a list of words",
    ),
    "index_topk_freq": _NUMBER,
    "index_skip_topk_offset": _NUMBER,
    "cli_factor": _NUMBER,
    "linear_attn_config": (
        lambda value: _is_object(value) and _are_numbers(_get(value, "kda_layers")),
        "an object, whose kda_layers are whole numbers",
    ),
    "layer_types": _WORDS,
    "mlp_layer_types": _WORDS,
    "first_k_dense_replace": _NUMBER,
    "n_routed_experts": _NUMBER,
    "n_group": _NUMBER,
    "q_lora_rank": _NUMBER,
    "kv_lora_rank": _COUNT,
    "hidden_size": _COUNT,
    "num_attention_heads": _COUNT,
    "index_topk": _COUNT,
    "index_n_heads": _COUNT,
    "index_head_dim": _COUNT,
    "qk_rope_head_dim": _NUMBER,
    "vocab_size": _COUNT,
    "max_position_embeddings": _COUNT,
}
"""Type that a config field must have if this package reads it, unless it is absent or null."""


@dataclass(frozen=True)
class Checkpoint:
    """A DSA checkpoint as far as IndexCache is concerned.

    Attributes:
        architecture: the HF architecture name.
        layer_ids: numbers of the model's layers that have DSA attention, in order; position i of a
            pattern is layer ``layer_ids[i]``. In all but hybrid models this is the identity.
        own: the sharing pattern that the checkpoint was trained with; all F if it has none. Its S
            layers ship no indexer weights.
        shape: config fields that tell models apart (used by the pattern library).
    """

    architecture: str
    layer_ids: tuple[int, ...]
    own: Pattern
    shape: Mapping[str, Any]

    @property
    def num_layers(self) -> int:
        """Number of attention layers that can have an indexer, which is the length of a pattern."""
        return len(self.layer_ids)

    @property
    def shares_already(self) -> bool:
        """Whether the checkpoint ships without some indexers."""
        return bool(self.own.shared_layers)

    @classmethod
    def from_config(cls, config: Any, where: str = "this model") -> Checkpoint:
        """Read a HF config: a transformers config object or the dict of a ``config.json``.

        Raises:
            CheckpointError: if it is not a DSA model that can share indices.
                :meth:`check_served` says whether SGLang can serve it.
        """
        check_fields(config, f"the config of {where}")
        text = text_config(config)
        architecture = _architecture(config, where)
        family = _family(architecture, text, where)
        if not any(_get(text, name) for name in LAYER_COUNTS):
            raise CheckpointError(
                f"the config of {where} has no {LAYER_COUNTS[0]}, the length of a pattern. Give "
                "the config.json that belongs to the weights."
            )
        layer_ids = family.layer_ids(text)
        if not layer_ids:
            raise CheckpointError(f"by its config no layer of {where} has an indexer to share.")
        shape = {name: value for name in SHAPE_FIELDS if (value := _get(text, name)) is not None}
        return cls(
            architecture=architecture,
            layer_ids=layer_ids,
            own=_own_pattern(text, layer_ids, where),
            shape=shape,
        )

    def check_served(self, where: str) -> None:
        """Refuse a model that SGLang cannot serve with shared indices, even if other engines can.

        Raises:
            CheckpointError: names the reason.
        """
        family = BY_ARCHITECTURE.get(self.architecture)
        if family is None:
            raise CheckpointError(
                f"{where} is a {self.architecture}, which IndexCache does not know: it cannot say "
                "whether SGLang hands indices on in this model. Serve it without "
                "--attention-backend indexcache."
            )
        if family.refused:
            raise CheckpointError(
                f"{where} is a {self.architecture}, which cannot share indices in SGLang: "
                f"{family.refused}. Serve it without IndexCache."
            )

    def check_trained(self, where: str) -> None:
        """Refuse an architecture that healing and adapters do not know.

        Raises:
            CheckpointError: names the architectures that they know.
        """
        if not family_of(self.architecture).model_type:
            trained = " and ".join(family.architecture for family in TRAINABLE.values())
            raise CheckpointError(
                f"{where} is a {self.architecture}, whose indexers are not trained here. "
                f"Those of {trained} are."
            )

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Read a checkpoint folder's ``config.json``.

        Raises:
            CheckpointError: unreadable, or not a DSA model that can share indices.
        """
        return cls.from_config(read_config(folder), str(folder))


def read_config(folder: Path) -> dict[str, Any]:
    """Return the ``config.json`` of a checkpoint folder.

    Raises:
        CheckpointError: unreadable.
    """
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is no folder of this machine, and a checkpoint's folder is wanted here. "
            f"Download the model first, and give the folder: hf download {folder} --local-dir "
            f"{folder.name}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{folder} is not a checkpoint: cannot read {path} ({error.strerror})"
        ) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a model's config, which is an object of JSON.")
    check_fields(config, str(path))
    return config


def fp8_blocks(folder: Path) -> tuple[int, int] | None:
    """Return the rows and columns of a checkpoint's FP8 blocks; None if its weights are plain.

    Raises:
        CheckpointError: the checkpoint is quantised in a format that cannot be read here.
    """
    config = read_config(folder)
    stored = next(
        (
            value
            for fields in (config, text_config(config))
            for name in QUANTISED
            if (value := _get(fields, name))
        ),
        None,
    )
    if stored is None and (folder / MODELOPT_FILE).exists():
        stored = {"quant_method": "modelopt"}
    if stored is None:
        return None
    if (blocks := block_size(stored)) is not None:
        return blocks
    method = _get(stored, "quant_method")
    details = (_get(stored, name) for name in ("quant_algo", "format", "bits"))
    name = " ".join(str(word) for word in (method or "in an unknown way", *details) if word)
    raise CheckpointError(
        f"{folder} is quantised: {name}{' without weight_block_size' * (method == 'fp8')}. Plain "
        "weights and block FP8 (quant_method fp8 with weight_block_size) are read here: take the "
        "model's bfloat16 or block-FP8 checkpoint. What is asked of a server (--url) can be "
        "quantised in any way."
    )


def block_size(quantisation: Any) -> tuple[int, int] | None:
    """Return the rows and columns of ``quantization_config``'s FP8 blocks; None if it has none."""
    blocks = _get(quantisation, "weight_block_size")
    if _get(quantisation, "quant_method") != "fp8" or not blocks or len(blocks) != 2:
        return None
    return int(blocks[0]), int(blocks[1])


def check_fields(config: Any, where: str) -> None:
    """Refuse config fields that have the wrong type.

    Args:
        config: a transformers config object, or a dict.
        where: the name of the config in the error.

    Raises:
        CheckpointError: names every such field.
    """
    problems = [
        f"{name} is {reprlib.repr(value)} and must be {form}"
        for name, (is_valid, form) in FORMS.items()
        if (value := _get(config, name)) is not None and not is_valid(value)
    ]
    if problems:
        raise CheckpointError(
            f"{where} is malformed: {'; '.join(problems)}. Write what the model was published with."
        )
    if (text := text_config(config)) is not config:
        check_fields(text, f"text_config in {where}")


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn any error that transformers raises on a config that it cannot read into one sentence.

    Raises:
        CheckpointError: names ``what``, and quotes transformers' message.
    """
    try:
        yield
    except (IndexCacheError, ImportError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"cannot read {what}: {reason or type(error).__name__}") from error


def pattern_from_sharing_keys(
    values: Mapping[str, Any], layer_ids: tuple[int, ...]
) -> Pattern | None:
    """Return the pattern that upstream's config keys describe, or None if they describe none.

    ``values`` maps :data:`SHARING_KEYS` to their values; None counts as absent. The keys count
    every layer of the model (``dsa_layer_skips_topk`` in ``sglang/srt/configs/model_config.py``),
    so ``layer_ids``, the model's layer at each position of the pattern, selects from them.

    Raises:
        PatternError: malformed values, or two keys that disagree.
    """
    patterns: dict[str, Pattern] = {}
    types = values.get("indexer_types")
    if types is not None:
        patterns["indexer_types"] = Pattern.from_indexer_types(_pick(types, layer_ids))
    text = values.get("index_topk_pattern")
    if text is not None:
        patterns["index_topk_pattern"] = _pattern_of_layers("".join(text), layer_ids)
    freq = values.get("index_topk_freq")
    if freq is not None:
        offset = values.get("index_skip_topk_offset")
        schedule = Pattern.from_freq(layer_ids[-1] + 1, freq, offset)
        patterns["index_topk_freq"] = Pattern("".join(schedule.text[i] for i in layer_ids))
    names = list(patterns)
    for name in names[1:]:
        if patterns[name] != patterns[names[0]]:
            raise PatternError(
                f"{names[0]} says {patterns[names[0]]} and {name} says {patterns[name]}. Give only "
                "one."
            )
    return patterns[names[0]] if names else None


def _pick(types: Any, layer_ids: tuple[int, ...]) -> list[str]:
    """Return the entries of ``indexer_types`` for DSA layers; the list may cover all layers."""
    if len(types) == len(layer_ids):
        return list(types)
    if len(types) <= layer_ids[-1]:
        raise PatternError(
            f"indexer_types has {len(types)} entries, the model needs {layer_ids[-1] + 1}"
        )
    return [types[layer] for layer in layer_ids]


def _pattern_of_layers(letters: str, layer_ids: tuple[int, ...]) -> Pattern:
    """Return the part of ``index_topk_pattern`` for DSA layers; SGLang's string has every layer.

    Raises:
        PatternError: the string is too short, or too long for a model whose layers all have DSA.
    """
    needed = layer_ids[-1] + 1
    if needed == len(layer_ids):
        pattern = Pattern(letters)
        pattern.check_length(needed)
        return pattern
    if len(letters) < needed:
        raise PatternError(
            f"index_topk_pattern has {len(letters)} letters, and SGLang counts every layer of the "
            f"model in it: the last of the {len(layer_ids)} indexers is in layer {needed - 1}. "
            "Give a letter for each layer, or those of the indexers to --indexcache-pattern."
        )
    return Pattern("".join(letters[layer] for layer in layer_ids))


def _own_pattern(text: Any, layer_ids: tuple[int, ...], where: str) -> Pattern:
    count = len(layer_ids)
    cli_factor = _get(text, "cli_factor") or 1
    if cli_factor > 1:  # LongCat: fresh indices every cli_factor layers
        return Pattern.uniform(count, cli_factor)
    # A config class may derive indexer_types from weaker keys, so only the strongest counts.
    for key in SHARING_KEYS[:3]:
        value = _get(text, key)
        if value is None:
            continue
        values = {key: value, "index_skip_topk_offset": _get(text, "index_skip_topk_offset")}
        try:
            pattern = pattern_from_sharing_keys(values, layer_ids)
        except PatternError as error:
            raise CheckpointError(f"the config of {where} is malformed: {error}") from error
        if pattern is not None:
            return pattern
    return Pattern.full(count)


def _family(architecture: str, text: Any, where: str) -> Family:
    """Return the family of a model that may share indices; a default family if none is listed."""
    family = family_of(architecture)
    if family.unsupported:
        raise CheckpointError(
            f"{where} is a {architecture}, whose indices IndexCache does not share: "
            f"{family.unsupported}."
        )
    if _get(text, "index_topk") is not None:
        return family
    fields = text if isinstance(text, Mapping) else vars(text)
    if any(str(name).startswith("index_") and value for name, value in fields.items()):
        raise CheckpointError(
            f"{where} is a {architecture}, whose config has no index_topk: its indexer is of "
            "another kind than DeepSeek Sparse Attention's, and its selections cannot be shared."
        )
    raise CheckpointError(
        f"{where} is a {architecture} without a lightning indexer, so there is nothing to "
        "share. IndexCache is for DeepSeek Sparse Attention models (DeepSeek-V3.2, GLM-5, "
        "...). Give the folder of such a model; SGLang serves this one without "
        "--attention-backend indexcache."
    )


def _architecture(config: Any, where: str) -> str:
    names = _get(config, "architectures")
    if not names:
        raise CheckpointError(f"the config of {where} names no architecture")
    return str(names[0])


def text_config(config: Any) -> Any:
    """Return the language model's part of a multimodal config, or the config itself."""
    text = _get(config, "text_config")
    return config if text is None else text
