"""The paper's stages in one process: dense, dense warm-up of the indexers, sparse training.

A run lives in one folder and goes on from its newest state when it is started again. Row ``i`` of
step ``s`` depends on the seed alone, so an interruption does not change what is learned.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.random_model import make_tokenizer, random_model, save_checkpoint
from benchmarks.training.batches import IGNORED, LabelledBatch, Mixture
from benchmarks.training.model import DistilledModel, Losses, next_tokens
from benchmarks.training.recipe import Recipe, StageRecipe
from benchmarks.training.retrieval import MachineText, TaskWords
from benchmarks.training.scores import evaluate
from sglang_indexcache.lab.heal.forward_state import Stage
from sglang_indexcache.lab.heal.optimizer import BETAS, adamw_groups, lr_factor, set_lr
from sglang_indexcache.lab.heal.packing import PADDING
from sglang_indexcache.lab.heal.run_folder import Position, RunLog
from sglang_indexcache.library.writing import replacing

STATE = "state.pt"


class Tally:
    """Sums over some steps, until they are logged as means.

    Args:
        layers: of the model.
    """

    def __init__(self, layers: int) -> None:
        self.sums = torch.zeros(5 + layers, dtype=torch.float64)
        self.norms: list[tuple[float, float]] = []

    def means(self, stage: Stage) -> dict[str, Any]:
        """Return what a line of the log says.

        ``lm`` is in nats per labelled token and ``accuracy`` the share of right answers to
        retrieval questions, neither in the warm-up stage, which makes no logits; ``index`` is the
        distillation loss per query, summed over layers, and ``index_by_layer`` its parts. The
        norms are those of gradients before clipping, of what the LM loss trains and of the
        indexers.
        """
        lm, hits, answers, tokens, queries, *index = self.sums.tolist()
        means: dict[str, Any] = {}
        if stage is not Stage.WARMUP:
            means["lm"] = lm / max(tokens, 1.0)
            means["accuracy"] = hits / max(answers, 1.0)
        by_layer = [layer / max(queries, 1.0) for layer in index]
        body, indexer = (sum(norms) / len(norms) for norms in zip(*self.norms, strict=True))
        norms = {"body_norm": body, "indexer_norm": indexer}
        return means | {"index": sum(by_layer)} | norms | {"index_by_layer": by_layer}


class Trainer:
    """Runs a recipe in a folder.

    Args:
        recipe: what to do.
        folder: state, log and the final checkpoint (``folder/checkpoint``) go here.
        console: for progress.
    """

    def __init__(self, recipe: Recipe, folder: Path, console: Console | None = None) -> None:
        self.recipe, self.folder = recipe, folder
        self.pattern = recipe.resolved_pattern()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        folder.mkdir(parents=True, exist_ok=True)
        model, self.tokenizer = self._build()
        self.model = DistilledModel(model, self.pattern, recipe.cross_layer, recipe.block)
        self.model.to(self.device)
        self.words = TaskWords(self.tokenizer)
        self._texts: dict[int, MachineText] = {}
        self.log = RunLog(folder, console or Console())

    def run(self) -> Path:
        """Train to the end of the last stage, resuming if the folder holds a state.

        Returns:
            The folder of the finished checkpoint.
        """
        path = self.folder / STATE
        state = torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None
        self.log.say(f"pattern {self.pattern}: {self.pattern.summary()}")
        for number, stage in enumerate(self.recipe.stages):
            if state is None or number >= state["stage"]:
                resumed = state if state is not None and number == state["stage"] else None
                self._stage(number, stage, resumed)
        target = self.folder / "checkpoint"
        save_checkpoint(self.model.model, self.tokenizer, self.recipe.dtype, target)
        self.log.say(f"wrote {target}")
        return target

    def _build(self) -> tuple[Any, Any]:
        """Build the model in float32, and its tokenizer."""
        recipe = self.recipe.model
        if recipe.checkpoint is not None:
            model = AutoModelForCausalLM.from_pretrained(recipe.checkpoint, dtype=torch.float32)
            return model, AutoTokenizer.from_pretrained(recipe.checkpoint)
        folder = self.folder / "tokenizer"
        if not (folder / "tokenizer.json").exists():
            make_tokenizer(recipe.vocab_size).save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return random_model(recipe.family, recipe.config(), tokenizer, self.recipe.seed), tokenizer

    def _stage(self, number: int, stage: StageRecipe, state: dict[str, Any] | None) -> None:
        kind, start = Stage(stage.kind), 0
        self.model.prepare_stage(kind)
        self.model.train()
        optimizers = make_optimizers(self.model, stage, self.recipe.weight_decay)
        if state is not None:
            start = state["step"]
            self.model.load_state_dict(state["model"])
            for optimizer, values in zip(optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(values)
            self.log.say(f"resumed after step {start} of stage {number} ({stage.kind})")
        self.log.rewind(Position(number, start))
        mixture = self._mixture(stage, held_out=False)
        began = time.perf_counter()
        tally = Tally(len(self.pattern))
        for step in range(start, stage.steps):
            factor = lr_factor(step, stage.steps, stage.warmup_steps, stage.final_lr)
            set_lr(optimizers, factor)
            self._step(optimizers, mixture, number, step, stage, tally)
            finished = step + 1
            last = finished == stage.steps
            if last or finished % self.recipe.log_every == 0:
                seconds = time.perf_counter() - began
                where = self._where(number, finished, stage)
                line = {**where, **tally.means(kind), "seconds": seconds}
                self.log.record(**line)
                self.log.say(in_words(line))
                tally = Tally(len(self.pattern))
            if last or (self.recipe.eval_every and finished % self.recipe.eval_every == 0):
                self._evaluate(number, finished, stage)
            if last or finished % self.recipe.save_every == 0:
                self._save(number, finished, optimizers)
                tally = Tally(len(self.pattern))  # a resumed run starts with none either

    def _where(self, number: int, step: int, stage: StageRecipe) -> dict[str, Any]:
        before = sum(s.steps for s in self.recipe.stages[:number])
        return {"stage": number, "step": step, "kind": stage.kind, "total_step": before + step}

    def _save(self, number: int, step: int, optimizers: list[torch.optim.Optimizer]) -> None:
        with replacing(self.folder / STATE) as part:
            state = {"stage": number, "step": step, "model": self.model.state_dict()}
            torch.save(
                state | {"optimizers": [optimizer.state_dict() for optimizer in optimizers]}, part
            )

    def _step(
        self,
        optimizers: list[torch.optim.Optimizer],
        mixture: Mixture,
        number: int,
        step: int,
        stage: StageRecipe,
        tally: Tally,
    ) -> None:
        kind = Stage(stage.kind)
        name = number * 1_000_000_000 + step  # stages must not repeat each other's rows
        batch = mixture.batch(name, range(stage.rows), stage.length).to(self.device)
        tokens = (next_tokens(batch.labels, batch.documents) != IGNORED).sum().float()
        queries = (batch.documents != PADDING).sum().float()
        losses: Losses = self.model(batch.ids, batch.labels, batch.documents, batch.positions, kind)
        parts = []
        if kind is not Stage.WARMUP:
            parts.append(losses.lm / tokens.clamp_min(1.0))
        if kind is not Stage.DENSE:
            parts.append(losses.index.sum() / queries.clamp_min(1.0))
        torch.stack(parts).sum().backward()  # type: ignore[no-untyped-call]
        tally.norms.append(self._clip())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        tally.sums += _sums(losses, batch, tokens, queries)

    def _clip(self) -> tuple[float, float]:
        """Clip body and indexers apart: neither loss may scale the other's step."""
        norms = []
        for parameters in (self.model.body_parameters(), self.model.indexer_parameters()):
            trained = [p for p in parameters if p.grad is not None]
            norm = nn.utils.clip_grad_norm_(trained, self.recipe.clip) if trained else 0.0
            norms.append(float(norm))
        return norms[0], norms[1]

    def _evaluate(self, number: int, step: int, stage: StageRecipe) -> None:
        mixture = self._mixture(stage, held_out=True)
        attention = Stage.SPARSE if stage.kind == Stage.SPARSE else Stage.DENSE
        tasks, rows = list(mixture.weights), self.recipe.eval_rows
        scores = evaluate(self.model, mixture, tasks, rows, stage.length, attention)
        values = {f"held_out_{score.task}": score.value for score in scores}
        line = {**self._where(number, step, stage), **values}
        self.log.record(**line)
        self.log.say(in_words(line))

    def _mixture(self, stage: StageRecipe, held_out: bool) -> Mixture:
        data = stage.data or self.recipe.data
        limit = data.text_characters
        if limit not in self._texts:
            self._texts[limit] = MachineText.read(self.tokenizer, limit)
        return Mixture(
            tokenizer=self.tokenizer,
            text=self._texts[limit],
            words=self.words,
            weights=data.mixture,
            lengths=data.lengths,
            seed=self.recipe.seed,
            held_out=held_out,
        )


def make_optimizers(
    model: DistilledModel, stage: StageRecipe, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Make optimisers over what the stage trains: the body's have their own learning rate."""
    indexer = [p for p in model.indexer_parameters() if p.requires_grad]
    body = [(n, p) for n, p in model.named_body_parameters() if p.requires_grad]
    muon = [p for n, p in body if stage.optimizer == "muon" and _hidden_matrix(n, p)]
    muon_ids = {id(p) for p in muon}
    groups = adamw_groups([p for _, p in body if id(p) not in muon_ids], stage.lr, weight_decay)
    groups += adamw_groups(indexer, stage.indexer_lr, weight_decay)
    optimizers: list[torch.optim.Optimizer] = []
    if groups:
        optimizers.append(torch.optim.AdamW(groups, betas=BETAS))
    if muon:
        # Scaled so that a learning rate means what it means for AdamW.
        lr, adjust = stage.muon_lr or stage.lr, "match_rms_adamw"
        matrices = [{"params": muon, "peak_lr": lr}]
        optimizers.append(
            torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn=adjust)
        )
    return optimizers


def _hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() == 2 and "embed_tokens" not in name and "lm_head" not in name


def _sums(
    losses: Losses, batch: LabelledBatch, tokens: torch.Tensor, queries: torch.Tensor
) -> torch.Tensor:
    """Return what a :class:`Tally` adds up of a step."""
    answers = batch.answers[:, 1:]
    hits = (losses.token_hits[:, :-1] & answers).sum()
    first = torch.stack([losses.lm.detach(), hits, answers.sum(), tokens, queries])
    return torch.cat([first.double(), losses.index.detach().double()]).cpu()


def in_words(line: dict[str, Any]) -> str:
    """Return the values of a log's line as people read them; lists are for the file."""
    short = {name: value for name, value in line.items() if not isinstance(value, list)}
    parts = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in short.items())
    return "  ".join(parts)
