from __future__ import annotations

from pathlib import Path

import pytest

from sglang_indexcache.errors import PatternError, TrainingError
from sglang_indexcache.training.recipe import load_recipe, parse_pattern, shipped_recipes
from tests.training.recipes import write


@pytest.mark.parametrize("name", ["tiny-dsa", "sharing"])
def test_shipped_recipes_are_valid(name: str) -> None:
    assert name in shipped_recipes()
    recipe = load_recipe(name)
    layers = recipe.model.fields.get("num_hidden_layers")
    if layers is not None:
        assert len(recipe.parsed_pattern(layers)) == layers


@pytest.mark.parametrize(
    ("text", "expected"),
    [("full", "FFFFFF"), ("uniform:1/2", "FSFSFS"), ("uniform:1/4", "FSSSFS"), ("FFSSFS",) * 2],
)
def test_patterns(text: str, expected: str) -> None:
    assert str(parse_pattern(text, 6)) == expected


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
        ({"model": {"preset": "gpt"}}, "glm-5, deepseek-v3.2"),
        ({"model": {"checkpoint": "x", "fields": {"hidden_size": 8}}}, "not both"),
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


def test_bad_patterns() -> None:
    with pytest.raises(TrainingError, match="whole number"):
        parse_pattern("uniform:1/x", 4)
    with pytest.raises(TrainingError, match="none of"):
        parse_pattern("half", 4)
    with pytest.raises(PatternError, match="starts with S"):
        parse_pattern("SF", 2)
