"""``share`` on transformers models, against the tests' own oracle."""

from __future__ import annotations

import copy
from collections import Counter
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AXK2Config,
    DynamicCache,
    Glm5NextTextConfig,
    HYV4Config,
    HYV4ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel

from sglang_indexcache import share
from sglang_indexcache.errors import (
    CheckpointError,
    LibraryError,
    PatternError,
    StaleIndexError,
)
from sglang_indexcache.pattern import Pattern
from tests.fixtures.models import make_model
from tests.oracle import Oracle, generated, load_eager

PRESETS = ("glm-5", "deepseek-v3.2")
PATTERNS = ("FFFFFF", "FSFSFS", "FFSSSF", "FSSSSS")
IDS = torch.randint(10, 512, (1, 100), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=PRESETS)
def folder(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Path:
    return checkpoints[request.param]


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_eager(folder)


def indexers(model: Any) -> list[Any]:
    return [m.indexer for m in model.modules() if getattr(m, "indexer", None) is not None]


def logits(model: Any, ids: torch.Tensor = IDS, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **{"use_cache": False, **kwargs}).logits


def runs(model: Any, counts: Counter[int]) -> list[Any]:
    """Count by layer how often an indexer computes: its first projection, not its call."""
    return [
        indexer.wq_b.register_forward_hook(
            lambda *_, layer=indexer.layer_idx: counts.update([layer])
        )
        for indexer in indexers(model)
    ]


def is_untouched(model: Any) -> bool:
    return not any("forward" in vars(indexer) for indexer in indexers(model))


# -- the method -----------------------------------------------------------------------------------


def test_a_prefill_is_the_oracles_and_shared_indexers_do_not_run(folder: Path, model: Any) -> None:
    oracle = Oracle(folder, torch.float32, first_of_ties=False)
    ids = IDS[0].tolist()
    for text in PATTERNS:
        counts: Counter[int] = Counter()
        hooks = runs(model, counts)
        with share(model, Pattern(text)) as sharing:
            logprobs = logits(model)[0].log_softmax(-1)[:-1]
        for hook in hooks:
            hook.remove()
        assert counts == Counter(Pattern(text).full_layers)
        assert sharing.layer == Pattern(text).full_layers[-1]
        of_tokens = logprobs.gather(1, IDS[0, 1:, None]).squeeze(1)
        expected = oracle.answer(ids, Pattern(text)).logprobs
        torch.testing.assert_close(of_tokens, expected, rtol=0, atol=1e-5)


def test_greedy_generation_with_a_cache_is_the_oracles(folder: Path, model: Any) -> None:
    oracle = Oracle(folder, torch.float32, first_of_ties=False)
    for text in PATTERNS[1:]:
        counts: Counter[int] = Counter()
        hooks = runs(model, counts)
        with share(model, text):
            tokens = generated(model, IDS, 8)
        for hook in hooks:
            hook.remove()
        assert counts == Counter(dict.fromkeys(Pattern(text).full_layers, 8))
        answer = tokens[0, 100:].tolist()
        expected, gap = oracle.greedy_behind(IDS[0].tolist(), answer, Pattern(text))
        assert gap > 1e-6
        assert answer == expected


def test_a_batch_is_its_rows(model: Any) -> None:
    batch = torch.cat([IDS, IDS.flip(1)])
    with share(model, "FSFSFS"):
        batched = logits(model, batch)
        assert torch.allclose(batched[1:], logits(model, IDS.flip(1)), atol=1e-4)


# -- the model afterwards -------------------------------------------------------------------------


def test_the_model_is_restored_also_after_an_error(model: Any) -> None:
    plain = logits(model)
    with share(model, "FSSSSS"):
        assert not is_untouched(model)
    assert is_untouched(model)
    with pytest.raises(IndexError), share(model, "FSSSSS"):
        logits(model, IDS + 512)  # beyond the vocabulary
    assert is_untouched(model)
    assert torch.equal(logits(model), plain)


def test_the_inner_of_two_patterns_is_in_effect(model: Any) -> None:
    with share(model, "FFSSSF"):
        outer = logits(model)
        with share(model, "FSFSFS"):
            inner = logits(model)
        assert torch.equal(logits(model), outer)
    with share(model, "FSFSFS"):
        assert torch.equal(logits(model), inner)
    assert is_untouched(model)


def test_a_forward_that_was_put_there_by_others_stays(model: Any) -> None:
    """Such as accelerate's, which moves weights."""
    indexer = indexers(model)[0]
    calls: list[int] = []

    def foreign(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return type(indexer).forward(indexer, *args, **kwargs)

    indexer.forward = foreign
    try:
        with share(model, "FSSSSS"):
            logits(model)
        assert indexer.forward is foreign
    finally:
        del indexer.forward
    assert calls == [1]


# -- patterns -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("FSF", PatternError, "the pattern has 3 characters and the model has 6"),
        (Pattern("FSFSFSS"), PatternError, "1 too long"),
        ("SFFFFF", PatternError, "starts with S"),
        ("nope", LibraryError, "no pattern is called 'nope'"),
        ("1/4", LibraryError, "no pattern at retention 1/4 is known"),
    ],
)
def test_patterns_that_do_not_fit(
    model: Any, value: str | Pattern, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message), share(model, value):
        pass
    assert is_untouched(model)


def test_a_model_that_was_never_saved() -> None:
    model = hy_v4(["full"] * 4)
    assert model.config.architectures is None
    with share(model, "FFFS") as sharing:
        assert sharing.pattern == Pattern("FFFS")


def test_a_checkpoint_that_shares_already(tmp_path: Path) -> None:
    types = Pattern("FFSFFS").to_indexer_types()
    fields = {"indexer_types": types}
    make_model(tmp_path, size="tiny", vocab_size=512, dtype="float32", fields=fields)
    model, oracle = load_eager(tmp_path), Oracle(tmp_path, torch.float32, first_of_ties=False)
    for text in ("FFSFFS", "FFSFSS", "FSSSFS"):
        with share(model, text):
            last = logits(model)[0, -1]
        expected = oracle.answer(IDS[0].tolist(), Pattern(text)).next_logits
        assert torch.allclose(last, expected, atol=1e-4)
    with share(model, "full") as sharing:
        assert sharing.pattern == Pattern("FFSFFS")
    with pytest.raises(PatternError, match=r"layers 2 are F.*ships no indexer weights"):  # noqa: SIM117
        with share(model, "FFFFFS"):
            pass
    model.config.indexer_types = ["full"] * 6
    with pytest.raises(CheckpointError, match="lacks indexers that its config names"):  # noqa: SIM117
        with share(model, "FFSFFS"):
            pass


def test_a_model_without_indexers() -> None:
    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=8, intermediate_size=8, vocab_size=8, num_attention_heads=1
    )
    with pytest.raises(CheckpointError, match="nothing to share"):  # noqa: SIM117
        with share(LlamaForCausalLM(config), "F"):
            pass


SMALL = {
    **{"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 512},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    **{"qk_nope_head_dim": 8, "v_head_dim": 8, "index_n_heads": 2, "index_head_dim": 16},
    **{"index_topk": 16, "n_group": 1, "topk_group": 1, "pad_token_id": 0, "eos_token_id": 1},
}


# -- caches ---------------------------------------------------------------------------------------


@pytest.fixture(params=["dynamic", "static"])
def cache(request: pytest.FixtureRequest, model: Any) -> Any:
    if request.param == "dynamic":
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=110)


def go_on(model: Any, cache: Any, count: int = 1) -> torch.Tensor:
    arguments = signature(model.forward).parameters
    name = "cache" if "cache" in arguments else "past_key_values"  # until transformers 5.24
    return logits(model, IDS[:, :count], use_cache=True, **{name: cache})


def test_a_cache_without_index_keys_is_refused(model: Any, cache: Any) -> None:
    """It is refused also where one key would pass for all: the first token after a prefill."""
    with share(model, "FSSFSS"):
        go_on(model, cache, 100)
    with pytest.raises(PatternError, match="lacks its keys"):
        go_on(model, copy.deepcopy(cache))
    with pytest.raises(PatternError, match="lacks its keys"), share(model, "FFSFSS"):
        go_on(model, copy.deepcopy(cache))


def test_a_cache_goes_on_under_its_pattern(model: Any, cache: Any) -> None:
    with share(model, "FSSFSS"):
        go_on(model, cache, 99)
        expected = go_on(model, copy.deepcopy(cache))
    with share(model, "FSSFSS"):
        assert torch.equal(go_on(model, cache), expected)


def test_an_emptied_cache_serves_again(model: Any, cache: Any) -> None:
    expected = logits(model, IDS[:, :80])
    with share(model, "FSSFSS"):
        go_on(model, cache, 90)
    cache.reset()
    assert torch.allclose(go_on(model, cache, 80), expected, atol=1e-4)
    go_on(model, cache)


# -- training, and other families -----------------------------------------------------------------


def test_layers_out_of_order_are_refused(folder: Path) -> None:
    """Gradient checkpointing runs layers again, from the last to the first."""
    model = load_eager(folder).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with share(model, "FSFSFS"):
        loss = model(IDS, labels=IDS, use_cache=False).loss
        with pytest.raises(StaleIndexError, match="Turn gradient checkpointing off"):
            loss.backward()


def test_gradients_are_those_of_native_sharing(checkpoints: dict[str, Path]) -> None:
    glm = checkpoints["glm-5"]
    model, oracle = load_eager(glm), Oracle(glm, torch.float32)._model(Pattern("FSSFSS"))
    with share(model, "FSSFSS"):
        model(IDS, labels=IDS, use_cache=False).loss.backward()
    oracle(IDS, labels=IDS, use_cache=False).loss.backward()
    mine, expected = model.model.layers[1].self_attn, oracle.model.layers[1].self_attn
    assert torch.allclose(mine.o_proj.weight.grad, expected.o_proj.weight.grad, atol=1e-6)
    assert mine.o_proj.weight.grad.abs().sum() > 0


def hy_v4(types: list[str]) -> Any:
    return HYV4ForCausalLM(HYV4Config(**SMALL, qk_rope_head_dim=8, indexer_types=types))


def glm5_next(types: list[str]) -> Any:
    config = Glm5NextTextConfig(
        **SMALL,
        index_kpool=4,
        layer_types=["full_attention"] * 4,
        indexer_types=types,
    )
    return Glm5NextTextModel(config)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        *((hy_v4, "FFSS"), (hy_v4, "FSSF")),
        # transformers 5.19 hands indices to one S layer here, and fails at the next.
        *((glm5_next, "FSFS"), (glm5_next, "FFFS")),
    ],
)
def test_other_families_share_as_their_own_config_would(make: Any, text: str) -> None:
    model = make(["full"] * 4).eval()
    native = make(Pattern(text).to_indexer_types()).eval()
    native.load_state_dict(model.state_dict(), strict=False)
    model.config.architectures = ["HYV4ForCausalLM"]  # Glm5Next's text model has none of its own
    with torch.no_grad(), share(model, text):
        answer = model(IDS, use_cache=False)[0]
    with torch.no_grad():
        assert torch.equal(answer, native(IDS, use_cache=False)[0])
        assert not torch.equal(answer, model(IDS, use_cache=False)[0])


# -- which models ---------------------------------------------------------------------------------


def test_a_model_without_a_row_is_judged_by_its_modules(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with share(model, "FSFSFS"):
        expected = logits(model)
    monkeypatch.setattr(model.config, "architectures", ["NewDsaForCausalLM"])
    with pytest.warns(UserWarning, match="does not know NewDsaForCausalLM: the 6 layers"):  # noqa: SIM117
        with share(model, "FSFSFS"):
            assert torch.equal(logits(model), expected)


def test_indexers_of_another_kind_are_named_at_their_first_answer(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(indexers(model)[0])
    monkeypatch.setattr(kind, "forward", lambda _self, states, *_a, **_k: states)
    with pytest.raises(CheckpointError, match=rf"{kind.__name__} does not answer with one list"):  # noqa: SIM117
        with share(model, "FSFSFS"):
            logits(model)


@pytest.mark.parametrize("wrong", [0.25, list("FSSS"), None])
def test_what_is_no_pattern_is_refused_by_name(model: Any, wrong: Any) -> None:
    with pytest.raises(PatternError, match="a pattern is text such as"), share(model, wrong):
        pass


def test_a_folder_is_no_model(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="Load it first"), share(folder, "full"):
        pass


def test_every_form_of_a_pattern_is_taken(model: Any) -> None:
    with share(model, "uniform:1/3") as sharing:
        assert sharing.pattern == Pattern("FSSFSS")
    with share(model, "full") as sharing:
        assert sharing.pattern == Pattern("FFFFFF")


def test_ax_k2_shares(recwarn: pytest.WarningsRecorder) -> None:
    """SGLang 0.5.23 has no such model, which is no reason against the method."""
    torch.manual_seed(0)
    small = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_topk"), 16)
    small |= dict.fromkeys(("num_attention_heads", "num_key_value_heads", "index_n_heads"), 4)
    small |= {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "index_head_dim": 32}
    small |= dict.fromkeys(("moe_intermediate_size", "q_lora_rank", "kv_lora_rank"), 32)
    small |= {"num_hidden_layers": 6, "n_routed_experts": 4, "num_experts_per_tok": 2}
    model = AutoModelForCausalLM.from_config(AXK2Config(**small)).eval()
    plain = logits(model)
    with share(model, "FFFFFF"):
        assert torch.equal(logits(model), plain)
    selected = []
    for layer, indexer in enumerate(indexers(model)):
        indexer.wq_b.register_forward_hook(lambda *_, layer=layer: selected.append(layer))
    with share(model, "FSSFSS") as sharing:
        assert not torch.allclose(logits(model), plain, atol=1e-4)
    assert selected == [0, 3]
    assert sharing.indices is not None
    assert sharing.indices.shape == (1, 100, 16)
    assert torch.equal(logits(model), plain)
    assert not [w for w in recwarn if "does not know" in str(w.message)]
