"""The distillation loss on a real model in somebody else's trainer: transformers' ``Trainer``.

    python examples/loss_on_a_model.py

Needs transformers, accelerate and the small DSA checkpoint that comes with the package. The model
stays as it is; the indexers that the pattern keeps learn the attention of the layers they serve.

The trap: transformers' own indexer runs under ``torch.no_grad``, so a loss on what it computes
trains nothing. :func:`install` puts one in its place that has gradients, with the same parameters
under the same names, and files each layer's term of the loss while the model runs.
"""

from __future__ import annotations

import inspect
import tempfile
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from sglang_indexcache import Layout, Pattern
from sglang_indexcache.lab.demo import shipped_checkpoint
from sglang_indexcache.lab.heal.forward_state import Sharing, Stage
from sglang_indexcache.lab.heal.model import install, is_indexer

LENGTH = 256


class IndexerTrainer(Trainer):
    """A trainer of which the loss alone is replaced."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> torch.Tensor:
        """Return the mean over queries of L_multi, summed over the F layers, in nats."""
        ids = inputs["input_ids"]
        documents = torch.zeros_like(ids)  # one document a row; -1 is padding
        run = sharing_of(model).start(Stage.SPARSE, Layout(documents))
        model(input_ids=ids, use_cache=False)
        return sum(run.losses.values()) / run.layout.counted.sum()


def sharing_of(model: Any) -> Sharing:
    """Return what connects the layers of a model that went through :func:`prepared`."""
    sharing: Sharing = model.model.layers[0].self_attn.sharing
    return sharing


def prepared(pattern: Pattern) -> Any:
    """Return the model under a pattern, whose indexers alone are trained."""
    model = AutoModelForCausalLM.from_pretrained(shipped_checkpoint(), dtype=torch.float32)
    install(model, pattern, Sharing(pattern, model.config.index_topk))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_indexer(name))
    return model


def main(steps: int = 8) -> list[float]:
    """Train, print and return the loss of every step."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(shipped_checkpoint())
    ids = tokenizer(inspect.getsource(inspect), return_tensors="pt").input_ids[0]
    rows = [{"input_ids": row} for row in ids.split(LENGTH) if len(row) == LENGTH]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = IndexerTrainer(prepared(Pattern("FSSS" * 3)), arguments, train_dataset=rows)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"{losses[0]:.3f} to {losses[-1]:.3f} nats a query, over all layers")
    return losses


if __name__ == "__main__":
    main()
