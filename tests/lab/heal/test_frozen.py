"""A body of one layer at a time, against the same checkpoint loaded whole by transformers."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from sglang_indexcache.errors import CheckpointError, PatternError
from sglang_indexcache.lab.heal.forward_state import ForwardState, LocalSharing, Stage
from sglang_indexcache.lab.heal.frozen import FrozenBody, Passing, pass_through, shared_out
from sglang_indexcache.lab.heal.packing import Layout
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.adapters.weights import dequantised
from tests.fixtures.training import DistilledModel
from tests.lab.heal.checkpoints import BLOCK, checkpoint, quantise
from tests.lab.heal.models import FAMILIES, LAYERS, TOPK, one_document, tokens

CPU = [torch.device("cpu")]
PATTERN = Pattern("FSSF")
families = pytest.mark.parametrize("family", FAMILIES)
where = pytest.mark.parametrize("from_disk", [False, True])


def body_of(folder: Path, from_disk: bool = False) -> FrozenBody:
    sharing = LocalSharing(PATTERN, TOPK, block=7)
    return FrozenBody(folder, PATTERN, sharing, torch.float32, CPU, from_disk)


def train(
    body: FrozenBody, ids: torch.Tensor, stage: Stage, pieces: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients into ``body``'s indexers; the last layer's output and each layer's loss."""
    sharing: Any = next(iter(body.indexers.values())).sharing
    parts = ids.chunk(pieces)
    runs = [ForwardState(stage, Layout(torch.zeros_like(p)), float(ids.numel())) for p in parts]
    positions = torch.arange(ids.shape[1])
    states = [body.start(part, positions.expand_as(part)) for part in parts]
    activations = [state for state, _ in states]
    for number in range(LAYERS):
        layer = body.layer(number)
        for place, run in enumerate(runs):
            sharing.forward = run
            activations[place] = layer(activations[place], states[place][1])
        assert not any(state.requires_grad for state in activations)
        outputs = [set(run.index) | set(run.projected) | set(run.selected) for run in runs]
        serving = {0} if number in (0, 1) else set()
        assert outputs == [serving] * pieces  # nothing outlives the layers that it is for
    losses = torch.stack([torch.stack([run.losses[i] for i in range(LAYERS)]) for run in runs])
    return torch.cat(activations), losses.sum(0)


@families
@where
@pytest.mark.parametrize("stage", [Stage.WARMUP, Stage.SPARSE])
def test_gradients_equal_those_of_the_whole_model(
    tmp_path: Path, family: str, from_disk: bool, stage: Stage
) -> None:
    checkpoint(tmp_path, family)
    ids = tokens(3, 23)
    reference = DistilledModel(
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), PATTERN, block=7
    )
    reference.requires_grad_(False)
    for parameter in reference.indexer_parameters():
        parameter.requires_grad_(True)
    batch = one_document(ids)
    losses = reference(**batch, stage=stage)
    (losses.index.sum() / ids.numel()).backward()
    del batch["labels"]

    body = body_of(tmp_path, from_disk)
    hidden, index_losses = train(body, ids, stage, pieces=2)

    torch.testing.assert_close(index_losses, losses.index, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        expected = reference.hidden(**batch, stage=stage)
        torch.testing.assert_close(
            reference.model.model.norm(hidden), expected, rtol=1e-5, atol=1e-5
        )
    gradients = {n: p.grad for n, p in reference.model.named_parameters() if p.grad is not None}
    mine = {name: p.grad for name, p in body.indexer_tensors().items()}
    assert mine.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


class Memory(TorchDispatchMode):
    """The memory of all tensors that are made meanwhile, but of those within an operation.

    Attributes:
        largest: bytes of the largest tensor.
        peak: most bytes that were alive at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.peak = self._alive = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or not size:
            return
        self._known.add(key)
        self._alive += size
        self.largest, self.peak = max(self.largest, size), max(self.peak, self._alive)
        weakref.finalize(storage, self._drop, key, size).atexit = False

    def _drop(self, key: int, size: int) -> None:
        self._known.remove(key)
        self._alive -= size


@pytest.mark.parametrize("stage", [Stage.WARMUP, Stage.SPARSE])
@pytest.mark.parametrize("training", [True, False])
def test_memory_grows_no_faster_than_the_length(
    tmp_path: Path, stage: Stage, training: bool
) -> None:
    """Each tensor's does, and that of all alive (blocks' order is in ``test_packing.py``)."""
    checkpoint(tmp_path)
    body = body_of(tmp_path)
    sharing: Any = body.indexers[0].sharing
    sharing.block = 32
    usages = []
    for length in (256, 512):
        run = ForwardState(stage, Layout(torch.zeros(1, length, dtype=torch.int64)), 1.0)
        sharing.forward = run
        hidden, rotation = body.start(tokens(1, length), torch.arange(length)[None])
        layers = [body.layer(number) for number in range(LAYERS)]
        with Memory() as memory, torch.set_grad_enabled(training):
            for layer in layers:
                hidden = layer(hidden, rotation)
        usages.append((memory.largest, memory.peak))
        assert len(run.captured) == (0 if training else LAYERS)
    for before, after in zip(*usages, strict=True):
        assert after <= 2.4 * before
    assert usages[1][0] < 512**2  # a quarter of what a float32 matrix of 512 x 512 takes


@families
def test_block_fp8_is_the_checkpoint_that_was_dequantised(tmp_path: Path, family: str) -> None:
    checkpoint(tmp_path / "fp8", family)
    (tmp_path / "plain").mkdir()
    plain = tmp_path / "plain"
    for path in (tmp_path / "fp8").iterdir():
        (plain / path.name).write_bytes(path.read_bytes())
    quantise(tmp_path / "fp8")
    [path] = (tmp_path / "fp8").glob("*.safetensors")
    tensors = load_file(path)
    assert any(t.dtype == torch.float8_e4m3fn and ".experts." in n for n, t in tensors.items())
    spread = {}
    for name, tensor in tensors.items():
        if not name.endswith("_scale_inv"):
            spread[name] = tensor.float()
            for row, scales in enumerate(tensors.get(name + "_scale_inv", torch.empty(0))):
                for column, scale in enumerate(scales):
                    rows = slice(row * BLOCK, (row + 1) * BLOCK)
                    spread[name][rows, column * BLOCK : (column + 1) * BLOCK] *= scale
    save_file(spread, plain / path.name, metadata={"format": "pt"})
    ids = tokens(2, 19)
    trained = train(body_of(tmp_path / "fp8"), ids, Stage.SPARSE, pieces=1)
    expected = train(body_of(plain), ids, Stage.SPARSE, pieces=1)
    for ours, theirs in zip(trained, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_scales_of_blocks_at_the_edges() -> None:
    weight = torch.ones(5, 7).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    weights = dequantised(weight, scales, (4, 4))
    assert weights[:, 0].tolist() == [1, 1, 1, 1, 3]
    assert weights[4].tolist() == [3, 3, 3, 3, 4, 4, 4]


@pytest.mark.parametrize(
    ("pattern", "loads", "shares"),
    [
        ("FSSFSS", [1] * 6, [range(3), range(3, 6)]),
        ("FSFSSF", [4, 1, 2, 1, 1, 1], [range(2), range(2, 6)]),  # 5 and 5
        ("FSFSSF", [9, 1, 1, 1, 1, 1], [range(2), range(2, 6)]),
        ("FSSSFS", [1] * 6, [range(4), range(4, 6)]),  # what an indexer serves stays together
        ("FFFF", [1] * 4, [range(1), range(1, 2), range(2, 3), range(3, 4)]),
        ("FSSS", [1] * 4, [range(4), range(4, 4)]),
    ],
)
def test_the_fullest_device_holds_as_little_as_can_be(
    pattern: str, loads: list[int], shares: list[range]
) -> None:
    assert shared_out(Pattern(pattern), loads, len(shares)) == shares


@pytest.mark.parametrize("stage", [Stage.WARMUP, Stage.SPARSE])
@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_rows_on_several_devices_give_the_bits_of_one(
    tmp_path: Path, stage: Stage, quantised: bool, training: bool
) -> None:
    checkpoint(tmp_path, dtype=torch.bfloat16)
    if quantised:
        quantise(tmp_path)
    ids, outcomes = tokens(3, 19), []
    for devices in (1, 2):
        pattern = Pattern("FSFS")
        sharing = LocalSharing(pattern, TOPK, block=5)
        body = FrozenBody(
            tmp_path,
            pattern,
            sharing,
            torch.float32,
            [torch.device("cpu", i) for i in range(devices)],
        )
        positions = torch.arange(19)[None]
        rows = [
            Passing(
                ForwardState(stage, Layout(torch.zeros_like(row[None])), ids.numel()),
                *body.start(row[None], positions),
            )
            for row in ids
        ]
        assert sum(map(bool, body.shares)) == devices
        with torch.set_grad_enabled(training):
            pass_through(body, sharing, rows)
        bits = [state.hidden for state in rows]
        bits += [loss for state in rows for loss in state.run.losses.values()]
        bits += [mass for state in rows for mass, _ in state.run.captured.values()]
        bits += [p.grad for p in body.indexer_tensors().values() if p.grad is not None]
        assert len(bits) == len(rows) * (1 + (1 if training else 2) * LAYERS) + 10 * training
        outcomes.append(bits)
    for mine, theirs in zip(*outcomes, strict=True):
        assert torch.equal(mine, theirs)


def test_a_layer_of_experts_is_dequantised_into_place(tmp_path: Path) -> None:
    """It once took 2.3 times the layer: its parts, stacks of them, and what they were joined to."""
    checkpoint(tmp_path, dtype=torch.bfloat16)
    quantise(tmp_path)
    body = body_of(tmp_path)
    body.layer(LAYERS - 1)
    with Memory() as memory:
        run = body.layer(LAYERS - 1)
    weights = run.__closure__
    assert weights is not None
    sizes = [
        t.nbytes
        for cell in weights
        if isinstance(cell.cell_contents, dict)
        for t in cell.cell_contents.values()
    ]
    assert sum(sizes) > 0
    assert memory.peak < 1.2 * sum(sizes)


def test_what_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    [path] = tmp_path.glob("*.safetensors")
    tensors = load_file(path)
    missing = "model.layers.2.mlp.experts.1.up_proj.weight"
    save_file({n: t for n, t in tensors.items() if n != missing}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"has no tensor {missing}"):
        body_of(tmp_path)
    save_file(tensors | {missing: tensors[missing].to(torch.int8)}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="as I8, which is not understood"):
        body_of(tmp_path)


def test_an_indexer_that_the_checkpoint_lacks(tmp_path: Path) -> None:
    model = checkpoint(tmp_path)
    model.config.indexer_types = Pattern("FSSS").to_indexer_types()
    model.config.save_pretrained(tmp_path)
    with pytest.raises(PatternError):
        body_of(tmp_path)
