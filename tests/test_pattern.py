"""Pattern: every rule about strings of F and S."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_indexcache.errors import PatternError
from sglang_indexcache.pattern import Pattern

patterns = st.text("FS", max_size=90).map(lambda letters: Pattern("F" + letters))


@given(patterns)
def test_layers_are_partitioned(pattern: Pattern) -> None:
    assert sorted(pattern.full_layers + pattern.shared_layers) == list(range(len(pattern)))
    assert pattern.retention == Fraction(str(pattern).count("F"), len(pattern))


@given(patterns)
def test_source_is_the_nearest_full_layer_at_or_before(pattern: Pattern) -> None:
    for layer in range(len(pattern)):
        expected = max(j for j in range(layer + 1) if str(pattern)[j] == "F")
        assert pattern.source_of(layer) == expected
        assert pattern.is_full(layer) == (expected == layer)


@given(patterns)
def test_groups_tile_the_layers(pattern: Pattern) -> None:
    covered = [layer for group in pattern.groups for layer in group]
    assert covered == list(range(len(pattern)))
    for group in pattern.groups:
        assert {pattern.source_of(layer) for layer in group} == {group[0]}


@given(patterns)
def test_every_notation_comes_back(pattern: Pattern) -> None:
    assert Pattern(str(pattern)) == pattern
    assert Pattern.from_indexer_types(pattern.to_indexer_types()) == pattern
    assert Pattern.from_layers(len(pattern), pattern.full_layers) == pattern


def upstream_skips(layer: int, freq: int, offset: int | None) -> bool:
    """Return the schedule as SGLang 0.5.23 writes it (``dsa_layer_skips_topk``)."""
    if offset is not None:
        return max(layer - offset + 1, 0) % freq != 0
    return max(layer - 1, 0) % freq != 0


@given(st.integers(1, 90), st.integers(1, 12), st.none() | st.integers(1, 12))
def test_freq_is_upstreams_schedule(layers: int, freq: int, offset: int | None) -> None:
    pattern = Pattern.from_freq(layers, freq, offset)
    for layer in range(layers):
        assert pattern.is_full(layer) is not upstream_skips(layer, freq, offset)


@given(st.integers(1, 90), st.integers(1, 12))
def test_uniform_is_the_papers_and_not_upstreams(layers: int, ratio: int) -> None:
    block = "F" + "S" * (ratio - 1)
    assert str(Pattern.uniform(layers, ratio)) == (block * layers)[:layers]
    assert Pattern.uniform(layers, ratio) == Pattern.from_freq(layers, ratio, offset=1)


def test_known_schedules() -> None:
    # GLM-5.2 ships freq 4, offset 3: 21 F of 78 (layers 0, 1, 2, 6, 10, ..., 74).
    glm52 = Pattern.from_freq(78, 4, 3)
    assert glm52.full_layers == (0, 1, 2, *range(6, 78, 4))
    assert len(glm52.full_layers) == 21
    assert str(Pattern.from_freq(8, 4)) == "FFSSSFSS"
    assert str(Pattern.uniform(8, 4)) == "FSSSFSSS"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("fsss", "capital"),
        ("F SS", "white space"),
        ("FS\n", "white space"),
        ("FXS", "Only F and S"),
        ("fsl", "Only F and S"),
        ("FLS", r"contains 'L' \(first at character 1\)\. Only F and S"),
        ("FS+c4", "Only F and S"),
        ("SFFF", "starts with S"),
    ],
)
def test_bad_text_is_one_clear_error(text: str, message: str) -> None:
    with pytest.raises(PatternError, match=message):
        Pattern(text)


@given(st.text(max_size=12))
def test_only_f_and_s_not_starting_with_s_is_accepted(text: str) -> None:
    valid = bool(text) and set(text) <= {"F", "S"} and text[0] != "S"
    if valid:
        assert str(Pattern(text)) == text
    else:
        with pytest.raises(PatternError):
            Pattern(text)


def test_length_error_counts() -> None:
    with pytest.raises(PatternError, match="2 too short"):
        Pattern("FSSS").check_length(6)
    with pytest.raises(PatternError, match="1 too long"):
        Pattern("FSSS").check_length(3)


def test_checkpoint_may_lose_indexers_but_not_gain_them() -> None:
    shipped = Pattern("FFSFS")
    Pattern("FSSFS").check_checkpoint(shipped)
    with pytest.raises(PatternError, match="layers 2, 4 are F"):
        Pattern("FFFFF").check_checkpoint(shipped)


@given(patterns, st.data())
def test_checkpoint_compatibility_is_set_inclusion(shipped: Pattern, data: st.DataObject) -> None:
    asked_pattern = Pattern(
        "F" + data.draw(st.text("FS", min_size=len(shipped) - 1, max_size=len(shipped) - 1))
    )
    fits = set(asked_pattern.full_layers) <= set(shipped.full_layers)
    if fits:
        asked_pattern.check_checkpoint(shipped)
    else:
        with pytest.raises(PatternError):
            asked_pattern.check_checkpoint(shipped)


def test_pipeline_stage_must_start_full() -> None:
    pattern = Pattern("FSSFSS")
    pattern.check_stages([3])
    with pytest.raises(PatternError, match="stages start at layer 2"):
        pattern.check_stages([2, 3])


def test_bad_constructors() -> None:
    with pytest.raises(PatternError, match="do not exist"):
        Pattern.from_layers(4, [0, 4])
    with pytest.raises(PatternError, match="'full' and 'shared' only, found half"):
        Pattern.from_indexer_types(["full", "half"])
    with pytest.raises(PatternError, match="index_topk_freq"):
        Pattern.from_freq(4, 0)
    with pytest.raises(PatternError, match="index_skip_topk_offset"):
        Pattern.from_freq(4, 2, 0)
    with pytest.raises(PatternError, match="1/r"):
        Pattern.uniform(4, 0)
    with pytest.raises(IndexError):
        Pattern("FS").source_of(2)


def test_is_a_value() -> None:
    assert {Pattern("FS"): 1}[Pattern("FS")] == 1
    with pytest.raises(AttributeError):
        Pattern("FS").text = "FF"  # type: ignore[misc]


def test_a_digest_stands_for_one_pattern() -> None:
    digests = {text: Pattern(text).digest for text in ("FS", "FF", "FSS", "FSF")}
    assert len(set(digests.values())) == len(digests)
    assert Pattern("FS").digest == digests["FS"]
    assert all(re.fullmatch("[0-9a-f]{12}", digest) for digest in digests.values())
