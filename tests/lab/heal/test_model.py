"""The trainable model against transformers' own, and where its gradients go."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_indexcache.errors import PatternError, StaleIndexError, TrainingError
from sglang_indexcache.lab.heal.forward_state import Stage
from sglang_indexcache.lab.heal.losses import AttentionInputs, distillation_loss
from sglang_indexcache.lab.heal.model import attend
from sglang_indexcache.lab.heal.packing import Layout
from sglang_indexcache.pattern import Pattern
from tests.fixtures.training import DistilledModel
from tests.lab.heal.models import FAMILIES, LAYERS, TOPK, logits, make, one_document, tokens
from tests.oracle import _recorded_margins, _share

LENGTH = 23
PATTERNS = ["FFFF", "FSFS", "FSSS", "FSSF"]
families = pytest.mark.parametrize("family", FAMILIES)


def transformers_logits(model: Any, pattern: Pattern, ids: torch.Tensor) -> torch.Tensor:
    """Run plain transformers with the same sharing, its ties broken by the contract."""
    if model.config.model_type == "deepseek_v32":
        _share(model, pattern)
    watched = _recorded_margins(TOPK, [], first_of_ties=True)
    with torch.no_grad(), watched:
        return model(ids, use_cache=False).logits


def twin(family: str, pattern: Pattern) -> tuple[Any, DistilledModel]:
    """Return a plain transformers model with this sharing, and ours with the same weights."""
    shared = {"indexer_types": pattern.to_indexer_types()} if family == "glm-5" else {}
    plain = make(family, **shared).eval()
    plain.set_attn_implementation("eager")
    copy = make(family, **shared)
    copy.load_state_dict(plain.state_dict())
    return plain, DistilledModel(copy, pattern, block=7).eval()


@families
@pytest.mark.parametrize("text", PATTERNS)
def test_sparse_logits_equal_transformers(family: str, text: str) -> None:
    pattern, ids = Pattern(text), tokens(2, LENGTH)
    plain, ours = twin(family, pattern)
    mine = logits(ours, ids, Stage.SPARSE)
    torch.testing.assert_close(mine, transformers_logits(plain, pattern, ids), rtol=1e-5, atol=1e-5)


@families
def test_dense_stages_attend_to_everything(family: str) -> None:
    ids = tokens(2, LENGTH)
    everything = make(family, index_topk=LENGTH).eval()
    ours = make(family)
    ours.load_state_dict(everything.state_dict())
    expected = transformers_logits(everything, Pattern.full(LAYERS), ids)
    ours = DistilledModel(ours, Pattern("FSSF"), block=5)
    for stage in (Stage.DENSE, Stage.WARMUP):
        mine = logits(ours, ids, stage)
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


@families
@pytest.mark.parametrize("stage", [Stage.WARMUP, Stage.SPARSE])
def test_the_two_losses_reach_disjoint_parameters(family: str, stage: Stage) -> None:
    model = DistilledModel(make(family), Pattern("FSSF"))
    batch = one_document(tokens(2, LENGTH))
    losses = model(**batch, stage=stage)
    indexer, body = model.indexer_parameters(), model.body_parameters()
    assert len(indexer) == 2 * 5  # two F layers: wq_b, wk, k_norm's two, weights_proj
    if stage is Stage.SPARSE:  # the warm-up stage has no LM loss
        from_lm = torch.autograd.grad(
            losses.lm, indexer + body, retain_graph=True, allow_unused=True
        )
        assert all(g is None for g in from_lm[: len(indexer)])
        assert all(g is not None and g.abs().sum() > 0 for g in from_lm[len(indexer) :])
    from_index = torch.autograd.grad(losses.index.sum(), indexer + body, allow_unused=True)
    assert all(g is not None and g.abs().sum() > 0 for g in from_index[: len(indexer)])
    assert all(g is None for g in from_index[len(indexer) :])


@families
@pytest.mark.parametrize("sparse", [False, True], ids=["warmup", "sparse"])
def test_proposition_1_for_real_indexer_parameters(family: str, sparse: bool) -> None:
    """The model's L_multi and L_avg have equal gradients in every indexer parameter, float64."""
    pattern = Pattern("FSSS")
    model = DistilledModel(make(family), pattern, block=9)
    attentions: dict[int, AttentionInputs] = {}
    distil = model.sharing.distil

    def watched(layer: int, attention: AttentionInputs) -> None:
        attentions[layer] = attention
        distil(layer, attention)

    model.sharing.distil = watched  # type: ignore[method-assign]
    stage = Stage.SPARSE if sparse else Stage.WARMUP
    multi = model(**one_document(tokens(2, LENGTH)), stage=stage).index.sum()
    run = model.sharing.forward
    assert run is not None
    selected = run.selected[0] if sparse else None
    targets = [attentions[layer] for layer in range(LAYERS)]
    avg = distillation_loss(run.index[0], targets, run.layout, selected, block=9)
    parameters = model.indexer_parameters()
    assert parameters[0].dtype == torch.float64
    assert multi.item() > avg.item()  # KL is convex: the values differ by the targets' spread
    for a, b in zip(
        torch.autograd.grad(multi, parameters, retain_graph=True),
        torch.autograd.grad(avg, parameters),
        strict=True,
    ):
        assert a.abs().max() > 1e-3
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_without_cross_layer_loss_an_indexer_serves_itself_only() -> None:
    models = [DistilledModel(make("glm-5"), Pattern("FSSF"), across) for across in (False, True)]
    models[0].load_state_dict(models[1].state_dict())
    batch = one_document(tokens(1, LENGTH))
    alone, shared = (model(**batch, stage=Stage.SPARSE).index for model in models)
    assert alone[1] == alone[2] == 0
    torch.testing.assert_close(alone[0], 3 * shared[0])  # of 1/(m+1), m = 2
    torch.testing.assert_close(alone[3], shared[3])


@families
def test_packed_documents_equal_documents_alone(family: str) -> None:
    model = DistilledModel(make(family), Pattern("FSFS"), block=5)
    first, second = tokens(1, 9), tokens(1, 12)
    packed = torch.cat([first, second, tokens(1, 3)], dim=1)
    documents = torch.tensor([[0] * 9 + [1] * 12 + [-1] * 3])
    positions = torch.cat([torch.arange(9), torch.arange(12), torch.arange(3)])[None]
    labels = packed.where(documents >= 0, -100)
    together = model(packed, labels, documents, positions, Stage.SPARSE)
    parts = [model(**one_document(ids), stage=Stage.SPARSE) for ids in (first, second)]
    torch.testing.assert_close(together.token_nats[:, :9], parts[0].token_nats)
    torch.testing.assert_close(together.token_nats[:, 9:21], parts[1].token_nats)
    torch.testing.assert_close(together.index, parts[0].index + parts[1].index)
    torch.testing.assert_close(together.lm, parts[0].lm + parts[1].lm)
    assert together.lm_tokens == 8 + 11
    assert together.queries == 21


@pytest.mark.parametrize("stage", [Stage.DENSE, Stage.SPARSE])
def test_the_backward_pass_keeps_no_mask(stage: Stage) -> None:
    """Nothing that grows with the square of the length is kept: twice the tokens, twice as much."""

    def kept_bytes(length: int) -> int:
        """Values that autograd keeps of the attention of a forward pass."""
        sizes: dict[int, int] = {}
        queries, keys, values = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3))
        layout = Layout(torch.zeros(1, length, dtype=torch.int64))
        selected = torch.arange(4).expand(1, length, 4) if stage is Stage.SPARSE else None

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            out = attend(queries, keys, values, 1.0, layout, selected, block=16)
        assert out.requires_grad
        return sum(sizes.values())

    assert kept_bytes(512) <= 2 * kept_bytes(256) + 1024


def test_stages_freeze_what_they_do_not_train() -> None:
    model = DistilledModel(make("glm-5"), Pattern("FSFS"))
    trains = {Stage.DENSE: (False, True), Stage.WARMUP: (True, False), Stage.SPARSE: (True, True)}
    for stage, (indexer, body) in trains.items():
        model.prepare_stage(stage)
        assert {p.requires_grad for p in model.indexer_parameters()} == {indexer}
        assert {p.requires_grad for p in model.body_parameters()} == {body}


def test_wrong_models_and_patterns_are_clear_errors() -> None:
    with pytest.raises(PatternError, match="too short"):
        DistilledModel(make("glm-5"), Pattern("FSF"))
    shared = make("glm-5", indexer_types=["full", "shared", "full", "shared"])
    with pytest.raises(PatternError, match="layers 1, 3 are F"):
        DistilledModel(shared, Pattern("FFFF"))
    # Transformers would give a DeepSeek-V3.2 checkpoint's S layers random indexers.
    stripped = make("deepseek-v3.2", indexer_types=["full", "shared", "full", "shared"])
    with pytest.raises(PatternError, match="layers 1, 3 are F"):
        DistilledModel(stripped, Pattern("FFFF"))
    stranger = make("glm-5")
    stranger.config.model_type = "llama"
    with pytest.raises(TrainingError, match="cannot be healed"):
        DistilledModel(stranger, Pattern("FFFF"))


def test_a_layer_cannot_borrow_what_is_not_there() -> None:
    model = DistilledModel(make("glm-5"), Pattern("FSFS"))
    with pytest.raises(StaleIndexError, match="outside a forward pass"):
        model.sharing.selection(1)
    model.sharing.start(Stage.SPARSE, Layout(torch.zeros(1, 3, dtype=torch.int64)))
    with pytest.raises(StaleIndexError, match="layer 1 asked"):
        model.sharing.selection(1)
