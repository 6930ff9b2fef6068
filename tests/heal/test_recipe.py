from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import LibraryError, PatternError, TrainingError
from sglang_indexcache.heal.recipe import load_recipe, shipped_recipes
from sglang_indexcache.library import LIBRARY_VARIABLE, Library
from tests.heal.recipes import tiny, tiny_recipe, write


@pytest.mark.parametrize("name", ["tiny-dsa", "sharing"])
def test_shipped_recipes_are_valid(name: str) -> None:
    assert name in shipped_recipes()
    recipe = load_recipe(name)
    layers = recipe.model.fields.get("num_hidden_layers")
    if layers is not None:
        assert len(recipe.resolved_pattern()) == layers


SHARING = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "num_hidden_layers": 8,
    "index_topk": 64,
    "index_topk_pattern": "FFFSSSFS",
}


def entry(folder: Path, name: str, pattern: str) -> Path:
    """A pattern file for the model of :data:`SHARING`."""
    full = pattern.count("F")
    path = folder / f"{name}.yaml"
    model = {"name": "m", "architectures": ["GlmMoeDsaForCausalLM"], "num_layers": len(pattern)}
    fields = {
        "name": name,
        "model": model,
        "pattern": pattern,
        "full_layers": full,
        "retention": f"{full}/{len(pattern)}",
        "method": {"name": "by hand"},
        "source": {"title": "a test"},
    }
    path.write_text(yaml.safe_dump(fields))
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("full", "FFFSSSFS"),
        ("uniform:1/6", "FSSSSSFS"),
        ("FFSSSSSS", "FFSSSSSS"),
        ("mine", "FSFSSSSS"),
        ("1/4", "FSFSSSSS"),
        ("FILE", "FSFSSSSS"),
    ],
)
def test_a_pattern_means_what_it_means_for_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    """Every form, on a checkpoint that has sharing of its own."""
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path))
    file = entry(tmp_path, "mine", "FSFSSSSS")
    (tmp_path / "config.json").write_text(json.dumps(SHARING))
    value = str(file) if text == "FILE" else text
    recipe = tiny_recipe(model={"checkpoint": tmp_path}, pattern=value)
    assert str(recipe.resolved_pattern()) == expected
    served = Library.default().resolve(value, Checkpoint.read(tmp_path))
    assert recipe.resolved_pattern() == served.pattern


@pytest.mark.parametrize(
    ("text", "expected"), [("full", "FFFF"), ("uniform:1/2", "FSFS"), ("FFSS", "FFSS")]
)
def test_patterns_of_a_new_model(text: str, expected: str) -> None:
    assert str(tiny_recipe(pattern=text).resolved_pattern()) == expected


def test_overrides_replace_fields(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path / "r.yaml"), {"pattern": "full", "seed": 7})
    assert (recipe.pattern, recipe.seed) == ("full", 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": []}, "stages"),
        ({"sede": 1}, "sede"),
        ({"clip": 0}, "clip"),
        ({"stages": [{"kind": "warm", "steps": 1, "rows": 1, "length": 8}]}, "stages.0.kind"),
        ({"data": {**tiny()["data"], "files": ["x"]}}, "belong together"),
        ({"model": {"preset": "gpt"}}, "glm-5, deepseek-v3.2"),
        ({"model": {"checkpoint": "x", "fields": {"hidden_size": 8}}}, "not both"),
        ({"loss_kernel": "cuda"}, "loss_kernel"),
        (
            {"loss_kernel": "triton", "stages": tiny()["stages"][:2]},
            "loss_kernel is triton, which is for sparse stages",
        ),
        ({"model": {"dtype": "bfloat16"}}, "give model.checkpoint"),
        ({"model": {"checkpoint": "x", "dtype": "bfloat16"}}, "but a dense stage trains those"),
    ],
)
def test_errors_name_the_field(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        load_recipe(write(tmp_path / "r.yaml", **change))


def test_unreadable_recipes(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"missing\.yaml.*one of sharing, tiny-dsa"):
        load_recipe(tmp_path / "missing.yaml")
    with pytest.raises(TrainingError, match="cannot read the recipe"):
        load_recipe(tmp_path)
    bad = tmp_path / "bad.yaml"
    bad.write_text("a: [")
    with pytest.raises(TrainingError, match="is not YAML"):
        load_recipe(bad)
    bad.write_text("- a list")
    with pytest.raises(TrainingError, match="holds no recipe"):
        load_recipe(bad)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("uniform:1/x", PatternError, "written uniform:1/r"),
        ("half", LibraryError, "no pattern is called 'half'"),
        ("1/3", LibraryError, "no pattern at retention 1/3"),
        ("SFFF", PatternError, "starts with S"),
        ("FSF", PatternError, "too short"),
    ],
)
def test_bad_patterns(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tiny_recipe(pattern=text).resolved_pattern()
