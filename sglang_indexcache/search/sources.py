"""What a search measures, and with what: each source opens to a :class:`Setup`.

Everything that can be checked is checked before a model is loaded or a server is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from sglang_indexcache.ask.pool import ONE_CALL, LoadPolicy, Pool
from sglang_indexcache.ask.score import Engine
from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.data.documents import MACHINE
from sglang_indexcache.data.marking import Marker, Mask
from sglang_indexcache.errors import SearchError
from sglang_indexcache.library import Library, ModelInfo
from sglang_indexcache.models import RECOGNISED_BY
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.calibration import Calibration, Score, prepare
from sglang_indexcache.search.evaluators import BatchLosses, Evaluator, TokenEvaluator
from sglang_indexcache.search.evaluators.served import ServedEvaluator
from sglang_indexcache.study.provenance import checkpoint_digest

DEFAULT_CONTEXT = 8
"""The default context, in multiples of what a query selects (``index_topk``)."""
ADVISED_CONTEXT = 4
"""The least that is used without a warning."""


@dataclass(frozen=True)
class Setup:
    """An evaluator over data, with its provenance.

    Attributes:
        evaluator: measures.
        checkpoint: what is measured, as far as patterns are concerned.
        model: for the pattern library.
        name: prefix of the names of the patterns that are found.
        identity: hashes and kind of evaluator; a journal belongs to one identity.
        data: the data in words.
        seed: of the data's shuffle.
        objective: which tokens' loss is measured, in words; "" where there are no tokens.
        reading: what became of the documents, in words.
        counts: predictions that count in a batch, in words.
        advice: a warning about the data, or "".
        held_out: see :class:`~sglang_indexcache.search.calibration.Calibration`.
        counted: its masks, batch by batch.
    """

    evaluator: Evaluator
    checkpoint: Checkpoint
    model: ModelInfo
    name: str
    identity: Mapping[str, str]
    data: str
    seed: int
    objective: str = ""
    reading: str = ""
    counts: str = ""
    advice: str = ""
    held_out: int = 0
    counted: Sequence[Sequence[Mask]] = ()

    @property
    def rows(self) -> Iterator[tuple[str, str]]:
        """What a user should know before a model runs: a name and a sentence each."""
        if self.objective:
            yield "objective", f"loss of {self.objective} ({self.counts} in a batch)"
            yield "data", f"{self.data}: {self.reading}"
        if self.advice:
            yield "advice", self.advice

    @property
    def token_evaluator(self) -> TokenEvaluator:
        """The evaluator, which knows the loss of every token.

        Raises:
            SearchError: it does not.
        """
        if not hasattr(self.evaluator, "token_losses"):
            raise SearchError("this evaluator knows no losses of single tokens")
        return self.evaluator  # type: ignore[return-value]

    def resolve(self, value: str) -> Pattern:
        """A pattern in any form that :meth:`Library.resolve` takes."""
        return Library.default().resolve(value, self.checkpoint).pattern


@dataclass(frozen=True)
class Data:
    """The data that patterns are measured on.

    Attributes:
        path: a file, a folder or :data:`MACHINE`, as for :func:`prepare`.
        context: most tokens of a sequence; None for :data:`DEFAULT_CONTEXT` times ``index_topk``.
        batches: calibration batches.
        per_batch: sequences in a batch.
        held_out: further batches, on which no pattern is chosen.
        seed: of the shuffle.
        use_held_out: measure on the held-out batches alone.
        score: which predictions count; None leaves it to the data (see :func:`prepare`).
    """

    path: str = MACHINE
    context: int | None = None
    batches: int = 16
    per_batch: int = 1
    held_out: int = 0
    seed: int = 0
    use_held_out: bool = False
    score: Score | None = None

    def calibration(self, model: Path, topk: int) -> Calibration:
        """The sequences, in the tokens of the checkpoint folder ``model``.

        Args:
            topk: tokens that its queries select.

        Raises:
            SearchError: a context in which they select everything, data that cannot be read or is
                too short, or an unfit tokenizer.
        """
        context = DEFAULT_CONTEXT * topk if self.context is None else self.context
        if context <= topk:
            raise SearchError(
                f"a context of {context} tokens cannot tell patterns apart: this model's queries "
                f"select {topk} tokens (index_topk), so there they attend to everything, whatever "
                f"is shared. Take {DEFAULT_CONTEXT * topk} or more (--context)."
            )
        from transformers import AutoTokenizer

        split = prepare(
            self.path,
            Marker(AutoTokenizer.from_pretrained(model), str(model)),
            context=context,
            batches=self.batches,
            per_batch=self.per_batch,
            held_out=self.held_out,
            seed=self.seed,
            topk=topk,
            score=self.score,
        )
        if self.use_held_out:
            return split.held_out
        return split.calibration.followed_by(split.held_out)


@dataclass(frozen=True)
class Served:
    """Servers in live mode that serve the checkpoint in ``model``.

    ``load`` and ``tell`` are as for :class:`~sglang_indexcache.ask.pool.Pool`.
    """

    model: Path
    data: Data
    engines: tuple[Engine, ...]
    load: LoadPolicy = ONE_CALL
    tell: Callable[[str], None] = print

    @contextmanager
    def open(self) -> Iterator[Setup]:
        """Reach the servers; several share the work."""
        ready = _Ready.read(self.model, self.data)
        pool = Pool(self.engines, self.load, self.tell)
        yield ready.setup("sglang", ServedEvaluator(pool, ready.calibration))


@dataclass(frozen=True)
class InProcess:
    """An engine in this process; ``start`` starts it on the checkpoint in ``model``."""

    model: Path
    data: Data
    start: Callable[[], AbstractContextManager[Engine]]

    @contextmanager
    def open(self) -> Iterator[Setup]:
        """Start the engine, and stop it at the end."""
        ready = _Ready.read(self.model, self.data)
        with self.start() as engine:
            yield ready.setup("sglang", ServedEvaluator(Pool([engine]), ready.calibration))


@dataclass(frozen=True)
class Local:
    """The checkpoint in ``model``, run by transformers in the torch dtype of this name."""

    model: Path
    data: Data
    dtype: str = "float32"

    @contextmanager
    def open(self) -> Iterator[Setup]:
        """Load the model."""
        from sglang_indexcache.search.evaluators.hf import TransformersEvaluator

        ready = _Ready.read(self.model, self.data)
        evaluator = TransformersEvaluator(self.model, ready.calibration, self.dtype)
        yield ready.setup(f"transformers {self.dtype}", evaluator)


@dataclass(frozen=True)
class PlannedSource:
    """Nothing that runs: the checkpoint's config and the data are read, to say what is to come."""

    model: Path
    data: Data

    @contextmanager
    def open(self) -> Iterator[Setup]:
        """Read; whoever measures with it fails."""
        ready = _Ready.read(self.model, self.data)
        yield ready.setup("nothing", _Nothing(ready.checkpoint.num_layers, ready.calibration))


class _Nothing:
    """Has the form of an evaluator and measures nothing."""

    in_flight = 1

    def __init__(self, num_layers: int, calibration: Calibration) -> None:
        self.num_layers, self.batch_tokens = num_layers, calibration.batch_tokens

    def loss(self, pattern: Pattern, batches: Sequence[int]) -> BatchLosses:
        raise NotImplementedError("a dry run measures nothing")


Source = Served | InProcess | Local | PlannedSource


@dataclass(frozen=True)
class _Ready:
    """A checkpoint and its data, read and checked."""

    model: Path
    data: Data
    checkpoint: Checkpoint
    digest: str
    calibration: Calibration
    topk: int

    @classmethod
    def read(cls, model: Path, data: Data) -> _Ready:
        checkpoint, digest = Checkpoint.read(model), checkpoint_digest(model)
        topk = int(checkpoint.shape["index_topk"])
        return cls(model, data, checkpoint, digest, data.calibration(model, topk), topk)

    def setup(self, kind: str, evaluator: Evaluator) -> Setup:
        if evaluator.num_layers != self.checkpoint.num_layers:
            raise SearchError(
                f"the engine serves {evaluator.num_layers} layers, the checkpoint in --model has "
                f"{self.checkpoint.num_layers}: these are two models"
            )
        data = self.calibration
        identity = {
            "evaluator": kind,
            "checkpoint": self.digest,
            "data": data.digest,
            "counted": data.objective.in_words(),
        }
        path = self.data.path
        name = "Python standard library sources" if path == MACHINE else Path(path).name
        info = _model_info(self.model.resolve().name, self.checkpoint)
        return Setup(
            evaluator,
            self.checkpoint,
            info,
            info.name,
            identity,
            f"{name}, {data.size}",
            self.data.seed,
            data.objective.in_words(),
            data.reading,
            data.counts,
            self._advice(),
            data.held_out,
            data.batch_counted,
        )

    def _advice(self) -> str:
        lengths = sorted(map(len, self.calibration.sequences))
        half, advised = lengths[len(lengths) // 2], ADVISED_CONTEXT * self.topk
        if half >= advised:
            return ""
        return (
            f"half of the sequences have at most {half} tokens, which is short for a model whose "
            f"queries select {self.topk}: few of them have much to choose from. Take {advised} or "
            "more (--context, and data with documents as long)."
        )


def _model_info(name: str, checkpoint: Checkpoint) -> ModelInfo:
    """How the pattern library recognises ``checkpoint``."""
    return ModelInfo(
        name=name,
        architectures=(checkpoint.architecture,),
        num_layers=checkpoint.num_layers,
        shape={key: checkpoint.shape[key] for key in RECOGNISED_BY if key in checkpoint.shape},
        note="Recognised by its shape; other weights of the same shape need a search of their own.",
    )
