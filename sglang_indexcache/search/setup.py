"""From what a user asked for to an evaluator over data, with its provenance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import SearchError
from sglang_indexcache.library import Library, ModelInfo
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.calibration import DEFAULT_DATA, Calibration, prepare
from sglang_indexcache.search.entries import Provenance, model_info
from sglang_indexcache.search.evaluator import Evaluator, TokenEvaluator
from sglang_indexcache.search.evaluators.pool import EvaluatorPool
from sglang_indexcache.search.evaluators.served import LiveEngine, ServedEvaluator
from sglang_indexcache.search.evaluators.synthetic import SyntheticEvaluator
from sglang_indexcache.support.provenance import checkpoint_digest, versions

StartEngine = Callable[[Path, Sequence[str]], AbstractContextManager[LiveEngine]]


@dataclass(frozen=True)
class Source:
    """What to measure and with what.

    Attributes:
        model: checkpoint folder; needed unless ``synthetic``.
        urls: servers in live mode.
        engine: keywords of an engine to start in this process, ``name=value`` or ``default``.
        synthetic: layers of a made-up landscape.
        data: calibration data, as for ``calibration.prepare``.
        context: tokens in a sequence.
        batches: calibration batches.
        per_batch: sequences in a batch.
        held_out: further batches.
        seed: of the shuffle.
        dtype: for transformers.
        delay: seconds a synthetic evaluation takes.
        use_held_out: measure on the held-out part.
        part: ``(i, n)``: measure on the i-th of n equal parts of the batches.
    """

    model: Path | None = None
    urls: tuple[str, ...] = ()
    engine: tuple[str, ...] = ()
    synthetic: int = 0
    data: str = DEFAULT_DATA
    context: int = 2048
    batches: int = 16
    per_batch: int = 1
    held_out: int = 0
    seed: int = 0
    dtype: str = "float32"
    delay: float = 0.0
    use_held_out: bool = False
    part: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class Setup:
    """An evaluator that is ready, and what is known about it.

    Attributes:
        evaluator: measures.
        own: the checkpoint's own sharing.
        identity: hashes and kind of evaluator; a journal belongs to one identity.
        model: for the pattern library.
        data: the data in words.
        seed: of the data's shuffle.
        checkpoint: None for a made-up landscape.
    """

    evaluator: Evaluator
    own: Pattern
    identity: dict[str, Any]
    model: ModelInfo
    data: str
    seed: int
    checkpoint: Checkpoint | None = None

    @property
    def token_evaluator(self) -> TokenEvaluator:
        """The evaluator, if it knows the loss of every token.

        Raises:
            SearchError: a made-up landscape does not.
        """
        if not hasattr(self.evaluator, "token_losses"):
            raise SearchError("a made-up landscape has no tokens; give --model")
        return self.evaluator  # type: ignore[return-value]

    def resolve(self, value: str) -> Pattern:
        """A pattern as users write it when they serve."""
        if self.checkpoint is None:
            pattern = Pattern(value)
            pattern.check_checkpoint(self.own)
            return pattern
        return Library.default().resolve(value, self.checkpoint).pattern

    def provenance(self, name: str = "") -> Provenance:
        """For the files that a search writes."""
        prefix = name or self.model.name
        return Provenance(prefix, self.model, self.data, self.identity, versions(), self.seed)


@contextmanager
def open_source(source: Source, start_engine: StartEngine | None = None) -> Iterator[Setup]:
    """Read the data, hash the checkpoint, load or reach the model; everything is checked first.

    Args:
        source: what the user asked for.
        start_engine: starts an engine in this process, for ``source.engine``.

    Raises:
        IndexCacheError: anything wrong with the source.
    """
    if source.synthetic:
        yield _synthetic(source)
        return
    if source.model is None:
        raise SearchError("give the checkpoint's folder with --model")
    if source.urls and source.engine:
        raise SearchError("give either --url or --engine")
    checkpoint = Checkpoint.read(source.model)
    digest = checkpoint_digest(source.model)
    calibration = _calibration(source, source.model)
    if source.engine:
        if start_engine is None:
            raise SearchError("an engine in this process cannot be started from here")
        with start_engine(source.model, source.engine) as engine:
            served = ServedEvaluator(engine, calibration)
            yield _setup(source, served, "sglang", checkpoint, digest, calibration)
    elif source.urls:
        pool = _served(source, calibration)
        yield _setup(source, pool, "sglang", checkpoint, digest, calibration)
    else:
        from sglang_indexcache.search.evaluators.hf import TransformersEvaluator

        local = TransformersEvaluator(source.model, calibration, source.dtype)
        kind = f"transformers {source.dtype}"
        yield _setup(source, local, kind, checkpoint, digest, calibration)


def _synthetic(source: Source) -> Setup:
    evaluator = SyntheticEvaluator(
        source.synthetic,
        source.batches // source.part[1],
        source.seed,
        source.part[0],
        delay=source.delay,
    )
    shape = ModelInfo(name="synthetic", architectures=("Synthetic",), num_layers=source.synthetic)
    own = Pattern.full(source.synthetic)
    return Setup(evaluator, own, evaluator.identity, shape, "made up", source.seed)


def _served(source: Source, calibration: Calibration) -> TokenEvaluator:
    from sglang_indexcache.client import Client

    members = [ServedEvaluator(Client(url), calibration) for url in source.urls]
    return members[0] if len(members) == 1 else EvaluatorPool(members)


def _setup(
    source: Source,
    evaluator: TokenEvaluator,
    kind: str,
    checkpoint: Checkpoint,
    digest: str,
    calibration: Calibration,
) -> Setup:
    if evaluator.num_layers != checkpoint.num_layers:
        raise SearchError(
            f"the engine serves {evaluator.num_layers} layers, the checkpoint in --model has "
            f"{checkpoint.num_layers}: these are two models"
        )
    identity = {"evaluator": kind, "checkpoint": digest, "data": calibration.digest}
    assert source.model is not None
    info = model_info(source.model.resolve().name, checkpoint)
    words = f"{_data_name(source.data)}, {len(calibration.batches)} batches of "
    words += f"{calibration.per_batch} x {calibration.context} tokens"
    return Setup(evaluator, checkpoint.own, identity, info, words, source.seed, checkpoint)


def _data_name(data: str) -> str:
    return "Python standard library sources" if data == DEFAULT_DATA else Path(data).name


def _calibration(source: Source, model: Path) -> Calibration:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.eos_token_id is None:
        raise SearchError(f"the tokenizer of {model} has no end-of-text token to pack with")
    split = prepare(
        source.data,
        lambda text: list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]),
        tokenizer.eos_token_id,
        context=source.context,
        batches=source.batches,
        per_batch=source.per_batch,
        held_out=source.held_out,
        seed=source.seed,
    )
    chosen = split.held_out if source.use_held_out else split.calibration
    place, parts = source.part
    size = len(chosen.sequences) // parts
    return replace(chosen, sequences=chosen.sequences[place * size : (place + 1) * size])
