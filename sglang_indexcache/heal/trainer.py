"""The staged trainer: dense, dense warm-up of the indexers, sparse training.

Runs on whatever ``accelerate`` is configured for. A run lives in one folder and continues from
its newest state when started again; row ``i`` of step ``s`` depends on the seed alone, so neither
an interruption nor the number of processes changes what is learned.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from sglang_indexcache.data.marking import Marker
from sglang_indexcache.errors import TrainingError
from sglang_indexcache.heal.checkpoints import build, save_checkpoint
from sglang_indexcache.heal.data.batches import TEXT, Batch, Mixture
from sglang_indexcache.heal.data.files import FILES, FileRows
from sglang_indexcache.heal.data.retrieval import TaskWords
from sglang_indexcache.heal.data.text import Text
from sglang_indexcache.heal.evaluate import SCORED_BY_LOSS, evaluate
from sglang_indexcache.heal.model import DistilledModel, Losses, next_tokens
from sglang_indexcache.heal.optimizer import lr_factor, make_optimizers, set_lr
from sglang_indexcache.heal.packing import IGNORED, PADDING
from sglang_indexcache.heal.recipe import DataRecipe, Recipe, StageRecipe
from sglang_indexcache.heal.run_folder import Position, RunLog, States
from sglang_indexcache.heal.sharing import Stage


class Tally:
    """Sums over all processes and some steps, until they are logged as means.

    Args:
        layers: of the model.
    """

    def __init__(self, layers: int) -> None:
        self.lm = self.tokens = self.hits = self.answers = self.queries = 0.0
        self.index = [0.0] * layers
        self.norms: list[tuple[float, float]] = []

    def means(self, stage: Stage) -> dict[str, Any]:
        """What a line of the log says.

        ``lm`` is in nats per labelled token and ``accuracy`` the share of right answers to
        retrieval questions, neither in the warm-up stage, which makes no logits; ``index`` is the
        distillation loss per query, summed over layers, and ``index_by_layer`` its parts. The
        norms are those of gradients before clipping, of what the LM loss trains and of the
        indexers.
        """
        found: dict[str, Any] = {}
        if stage is not Stage.WARMUP:
            found["lm"] = self.lm / max(self.tokens, 1.0)
            found["accuracy"] = self.hits / max(self.answers, 1.0)
        by_layer = [layer / max(self.queries, 1.0) for layer in self.index]
        found["index"] = sum(by_layer)
        found["body_norm"], found["indexer_norm"] = (
            sum(norms) / len(norms) for norms in zip(*self.norms, strict=True)
        )
        return found | {"index_by_layer": by_layer}


class Trainer:
    """Runs a recipe in a folder.

    Args:
        recipe: what to do.
        folder: states, log and the final checkpoint (``folder/checkpoint``) go here.
        console: for progress.
    """

    def __init__(self, recipe: Recipe, folder: Path, console: Console | None = None) -> None:
        from accelerate import Accelerator

        self.recipe, self.folder = recipe, folder
        _check_lengths(recipe)
        self.pattern = recipe.resolved_pattern()
        self.accelerator = Accelerator()
        recipe.loss_kernel.check(self.accelerator.device)
        main = self.accelerator.is_main_process
        folder.mkdir(parents=True, exist_ok=True)
        with self.accelerator.main_process_first():
            model, self.tokenizer = build(recipe.model, recipe.seed, folder / "tokenizer")
        self.model = DistilledModel(
            model, self.pattern, recipe.cross_layer, recipe.block, recipe.loss_kernel
        )
        if recipe.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.topk = self.model.sharing.topk
        self.words = TaskWords(self.tokenizer)
        self._texts: dict[int, Text] = {}
        self._files: dict[tuple[tuple[str, ...], int], FileRows] = {}
        self.log = RunLog(folder, main, console or Console(), recipe.tensorboard)

    def run(self) -> Path:
        """Train to the end of the last stage, resuming if the folder holds a state.

        Returns:
            The folder of the finished checkpoint.
        """
        states = States(self.folder, self.accelerator)
        reached = states.latest()
        self.log.say(f"pattern {self.pattern}: {self.pattern.summary()}")
        for number, stage in enumerate(self.recipe.stages):
            if reached is not None and number < reached.stage:
                continue
            resume = reached if reached is not None and reached.stage == number else None
            self._stage(number, stage, states, resume)
        return self._export()

    def _stage(
        self, number: int, stage: StageRecipe, states: States, resume: Position | None
    ) -> None:
        kind = Stage(stage.kind)
        self.model.prepare_stage(kind)
        self.model.sharing.topk = stage.topk or self.topk
        self.model.train()
        optimizers = make_optimizers(self.model, stage, self.recipe.weight_decay)
        prepared = self.accelerator.prepare(self.model, *optimizers)
        model, optimizers = prepared[0], list(prepared[1:])
        start = 0
        if resume is not None:
            states.load(resume)
            start = resume.step
            self.log.rewind(number, start)
            self.log.say(f"resumed after step {start} of stage {number} ({stage.kind})")
        mixture = self._mixture(stage, held_out=False)
        began = time.perf_counter()
        tally = Tally(len(self.pattern))
        for step in range(start, stage.steps):
            set_lr(optimizers, lr_factor(step, stage))
            self._step(model, optimizers, mixture, number, step, stage, tally)
            done = step + 1
            if done == stage.steps or _due(done, self.recipe.log_every):
                self.log.write(
                    **self._where(number, done, stage),
                    **tally.means(kind),
                    seconds=time.perf_counter() - began,
                )
                tally = Tally(len(self.pattern))
            if done == stage.steps or _due(done, self.recipe.eval_every):
                self._evaluate(number, done, stage)
            if done == stage.steps or _due(done, self.recipe.save_every):
                states.save(Position(number, done))
                tally = Tally(len(self.pattern))  # a resumed run starts with none either
        self.model = self.accelerator.unwrap_model(model)
        self.accelerator.free_memory()

    def _where(self, number: int, done: int, stage: StageRecipe) -> dict[str, Any]:
        before = sum(s.steps for s in self.recipe.stages[:number])
        return {"stage": number, "step": done, "kind": stage.kind, "total_step": before + done}

    def _step(
        self,
        model: Any,
        optimizers: list[Any],
        mixture: Mixture,
        number: int,
        step: int,
        stage: StageRecipe,
        tally: Tally,
    ) -> None:
        batches = self._micro_batches(mixture, number, step, stage)
        totals = self._totals(batches)
        sums = torch.zeros(3 + len(self.pattern), device=self.accelerator.device)
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            with nullcontext() if last else self.accelerator.no_sync(model):
                sums += self._backward(model, batch, Stage(stage.kind), totals)
        norms = self._clip()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        lm, hits, answers, *index = self.accelerator.reduce(sums, "sum").tolist()
        tally.lm += lm
        tally.tokens += totals[0].item()
        tally.hits += hits
        tally.answers += answers
        tally.index = [before + new for before, new in zip(tally.index, index, strict=True)]
        tally.queries += totals[1].item()
        tally.norms.append(norms)

    def _micro_batches(
        self, mixture: Mixture, number: int, step: int, stage: StageRecipe
    ) -> list[Batch]:
        """This process's share of a step's rows."""
        world = self.accelerator.num_processes
        rows = list(range(self.accelerator.process_index, stage.rows, world))
        size = stage.micro_rows or len(rows)
        name = number * 1_000_000_000 + step  # stages must not repeat each other's rows
        return [
            mixture.batch(name, rows[i : i + size], stage.length).to(self.accelerator.device)
            for i in range(0, len(rows), size)
        ]

    def _totals(self, batches: list[Batch]) -> torch.Tensor:
        """``[2]``: labelled tokens and queries of the step over all processes, at least 1."""
        counts = torch.zeros(2, device=self.accelerator.device)
        for batch in batches:
            counts[0] += (next_tokens(batch.labels, batch.documents) != IGNORED).sum()
            counts[1] += (batch.documents != PADDING).sum()
        total: torch.Tensor = self.accelerator.reduce(counts, "sum")
        return total.clamp_min(1.0)

    def _backward(
        self, model: Any, batch: Batch, stage: Stage, totals: torch.Tensor
    ) -> torch.Tensor:
        """One micro-batch; ``[lm, hits, answers, index of every layer]``, summed and detached."""
        losses: Losses = model(batch.ids, batch.labels, batch.documents, batch.positions, stage)
        parts = []
        if stage is not Stage.WARMUP:
            parts.append(losses.lm / totals[0])
        if stage is not Stage.DENSE:
            parts.append(losses.index.sum() / totals[1])
        # Data parallelism averages gradients over processes; the loss is a global sum.
        self.accelerator.backward(torch.stack(parts).sum() * self.accelerator.num_processes)
        answers = batch.answers[:, 1:]
        hits = (losses.token_hits[:, :-1] & answers).sum()
        found = torch.stack([losses.lm.detach(), hits, answers.sum()])
        return torch.cat([found.float(), losses.index.detach().float()])

    def _clip(self) -> tuple[float, float]:
        """Clip body and indexers apart: neither loss may scale the other's step."""
        norms = []
        for parameters in (self.model.body_parameters(), self.model.indexer_parameters()):
            trained = [p for p in parameters if p.grad is not None]
            norm = self.accelerator.clip_grad_norm_(trained, self.recipe.clip) if trained else None
            norms.append(float(norm) if norm is not None else 0.0)
        return norms[0], norms[1]

    def _evaluate(self, number: int, done: int, stage: StageRecipe) -> None:
        mixture = self._mixture(stage, held_out=True)
        kind = Stage(stage.kind)
        attention = Stage.SPARSE if kind is Stage.SPARSE else Stage.DENSE
        scores = evaluate(
            self.model,
            mixture,
            list(mixture.weights),
            self.recipe.eval_rows,
            stage.length,
            attention,
        )
        values = {
            f"held_out_{s.task}": s.loss if s.task in SCORED_BY_LOSS else s.accuracy for s in scores
        }
        self.log.write(**self._where(number, done, stage), **values)

    def _mixture(self, stage: StageRecipe, held_out: bool) -> Mixture:
        data: DataRecipe = stage.data or self.recipe.data
        limit = data.text_characters
        if limit not in self._texts:
            self._texts[limit] = Text.of_machine(self.tokenizer, limit)
        return Mixture(
            tokenizer=self.tokenizer,
            text=self._texts[limit],
            words=self.words,
            weights=data.mixture,
            lengths=data.lengths,
            seed=self.recipe.seed,
            held_out=held_out,
            files=self._file_rows(data, stage),
        )

    def _file_rows(self, data: DataRecipe, stage: StageRecipe) -> FileRows | None:
        """The rows of a user's files, read once for all stages of this length."""
        if not data.files:
            return None
        key = tuple(data.files), stage.length
        if key not in self._files:
            most = max(s.steps * s.rows for s in self.recipe.stages)
            marker = Marker(self.tokenizer, str(self.recipe.model.checkpoint or "the new model"))
            self._files[key] = FileRows.read(
                data.files, marker, stage.length, most, self.recipe.eval_rows
            )
        return self._files[key]

    def _export(self) -> Path:
        target = self.folder / "checkpoint"
        state = self.accelerator.get_state_dict(self.model)
        if self.accelerator.is_main_process:
            inner = {name.removeprefix("model."): value for name, value in state.items()}
            base = self.recipe.model.checkpoint
            save_checkpoint(
                self.model.model, inner, self.tokenizer, self.recipe.dtype, target, base
            )
            self.log.say(f"wrote {target}")
        self.accelerator.wait_for_everyone()
        return target


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def _check_lengths(recipe: Recipe) -> None:
    """Refuse data that would only fail after weights are made, or after hours."""
    for number, stage in enumerate(recipe.stages):
        data = stage.data or recipe.data
        if min(data.lengths) > stage.length and set(data.mixture) - {TEXT, FILES}:
            raise TrainingError(
                f"stages.{number} has rows of {stage.length} tokens, but no entry of its "
                f"data.lengths ({data.lengths}) fits"
            )
