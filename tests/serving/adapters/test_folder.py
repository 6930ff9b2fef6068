"""The adapter's folder: what is written is what is read, and each wrong thing has one error."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from sglang_indexcache.errors import CheckpointError, IndexCacheError, PatternError
from sglang_indexcache.lab.demo import shipped_checkpoint
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.adapters.folder import (
    ADAPTER_FILE,
    WEIGHTS_FILE,
    Adapter,
    indexer_layer,
)
from sglang_indexcache.serving.adapters.writing import write_adapter
from tests.kills import kill_at_each_touch

CHECKPOINT = shipped_checkpoint()
PATTERN = Pattern.uniform(12, 4)


def perturbed(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the F layers' indexers of the shipped checkpoint, changed."""
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(CHECKPOINT / "model.safetensors")
    return {
        name: (t.float() * (1 + 0.5 * torch.randn(t.shape, generator=generator))).to(t.dtype)
        for name, t in weights.items()
        if indexer_layer(name) in PATTERN.full_layers
    }


@pytest.fixture
def adapter(tmp_path: Path) -> Adapter:
    return write_adapter(
        tmp_path / "adapter",
        pattern=PATTERN,
        checkpoint=CHECKPOINT,
        tensors=perturbed(),
        record={"data": ["a.jsonl"], "steps": 80},
    )


def test_what_is_written_is_read(adapter: Adapter) -> None:
    assert Adapter.read(adapter.folder) == adapter
    assert adapter.pattern == PATTERN
    assert adapter.record == {"data": ["a.jsonl"], "steps": 80}
    for name, tensor in perturbed().items():
        torch.testing.assert_close(adapter.tensors()[name], tensor, rtol=0, atol=0)
    assert sorted(path.name for path in adapter.folder.parent.iterdir()) == ["adapter"]
    adapter.check(CHECKPOINT)


def test_it_takes_the_place_of_another(adapter: Adapter) -> None:
    again = write_adapter(
        adapter.folder,
        pattern=PATTERN,
        checkpoint=CHECKPOINT,
        tensors=perturbed(1),
        record={},
    )
    assert again.digest != adapter.digest
    assert sorted(path.name for path in adapter.folder.parent.iterdir()) == ["adapter"]


def test_a_kill_at_any_moment_leaves_a_whole_adapter_or_none(
    adapter: Adapter, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same command then writes it, whatever was left behind."""
    tensors = perturbed(1)

    def replace() -> Adapter:
        return write_adapter(
            adapter.folder, pattern=PATTERN, checkpoint=CHECKPOINT, tensors=tensors, record={}
        )

    def put_back() -> None:
        shutil.rmtree(adapter.folder, ignore_errors=True)
        shutil.copytree(before, adapter.folder)

    before = tmp_path_factory.mktemp("before") / "adapter"
    shutil.copytree(adapter.folder, before)
    digests = set()
    for _ in kill_at_each_touch(replace):
        digests.add(Adapter.read(adapter.folder).digest if adapter.folder.exists() else None)
        put_back()
    again = replace()
    assert digests == {adapter.digest, None, again.digest}
    assert [path.name for path in adapter.folder.parent.iterdir()] == ["adapter"]


def _no_yaml(folder: Path) -> None:
    (folder / ADAPTER_FILE).unlink()


def _yaml(change: Callable[[dict], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        data = yaml.safe_load((folder / ADAPTER_FILE).read_text())
        change(data)
        (folder / ADAPTER_FILE).write_text(yaml.safe_dump(data))

    return edit


def _unreadable(folder: Path) -> None:
    (folder / WEIGHTS_FILE).unlink()
    (folder / WEIGHTS_FILE).mkdir()


def _one_byte(folder: Path) -> None:
    content = bytearray((folder / WEIGHTS_FILE).read_bytes())
    content[-1] ^= 1
    (folder / WEIGHTS_FILE).write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_no_yaml, "is not an adapter: cannot read .*adapter.yaml"),
        (lambda f: (f / WEIGHTS_FILE).unlink(), "has no indexers.safetensors"),
        (_unreadable, "cannot read .*indexers.safetensors: Is a directory"),
        (_one_byte, "SHA-256 differs"),
        (lambda f: (f / ADAPTER_FILE).write_text("{"), "is not valid YAML"),
        (lambda f: (f / ADAPTER_FILE).write_text("- 1"), "is not an adapter's: the file"),
        (_yaml(lambda d: d.update(format=2)), "is not an adapter's: format"),
        (_yaml(lambda d: d["base"].pop("digest")), "is not an adapter's: base.digest"),
        (_yaml(lambda d: d.update(pattern="FFSSFSSSFSSS")), "has no model.layers.1.self_attn"),
        (_yaml(lambda d: d.update(pattern="FSSSFSSSSSSS")), "which is no part of an F layer's"),
        (_yaml(lambda d: d["base"]["shape"].update(q_lora_rank=8)), r"of shape \[512, 8\]"),
        (_yaml(lambda d: d.update(pattern="SSSS")), "starts with S"),
    ],
)  # fmt: skip
def test_a_damaged_one(adapter: Adapter, damage: Callable[[Path], None], says: str) -> None:
    damage(adapter.folder)
    with pytest.raises(IndexCacheError, match=says):
        Adapter.read(adapter.folder)


def test_another_pattern(adapter: Adapter) -> None:
    with pytest.raises(PatternError, match="for the pattern FSSSFSSSFSSS, and FFFF"):
        adapter.check_pattern(Pattern.full(12))


def test_another_base(adapter: Adapter, tmp_path: Path) -> None:
    changed = tmp_path / "other"
    shutil.copytree(CHECKPOINT, changed)
    weights = load_file(changed / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 2
    save_file(weights, changed / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"trained on tiny-dsa .* is another checkpoint"):
        adapter.check(changed)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.popitem(), "an adapter holds the whole indexer of each F layer"),
        (lambda t: t.update({"lm_head.weight": torch.ones(2)}), "holds lm_head.weight"),
        (lambda t: t.update({next(iter(t)): torch.full((128,), torch.nan)}), "not finite"),
        (lambda t: t.update({next(iter(t)): torch.ones(3)}), r"of shape \[3\]; it must be"),
        (lambda t: t.update({next(iter(t)): torch.ones(128).char()}), "as I8 .* must be F32 or"),
    ],
)
def test_tensors_that_are_no_adapter(
    tmp_path: Path, change: Callable[[dict], None], says: str
) -> None:
    tensors = dict(sorted(perturbed().items()))
    change(tensors)
    with pytest.raises(CheckpointError, match=says):
        write_adapter(
            tmp_path / "adapter", pattern=PATTERN, checkpoint=CHECKPOINT, tensors=tensors, record={}
        )
    assert not (tmp_path / "adapter").exists()


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="holds something else"):
        write_adapter(
            tmp_path, pattern=PATTERN, checkpoint=CHECKPOINT, tensors=perturbed(), record={}
        )
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"architectures": ["LongcatFlashForCausalLM"], "num_layers": 6},
            "not trained here. Those of",
        ),
        ({"q_lora_rank": None}, "has no q_lora_rank"),
    ],
)
def test_a_model_that_has_no_adapters(tmp_path: Path, fields: dict, says: str) -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(CheckpointError, match=says):
        write_adapter(
            tmp_path / "adapter",
            pattern=Pattern.full(12),
            checkpoint=tmp_path,
            tensors={},
            record={},
        )
