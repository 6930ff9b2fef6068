"""Pattern: every rule about strings of F, S and L, and what may stand behind them."""

import re
from fractions import Fraction
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_indexcache.errors import PatternError
from sglang_indexcache.pattern import (
    MOST_CANDIDATES,
    Pattern,
    Suffix,
    split_suffix,
)

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
    covered = [layer for group in pattern.groups for layer in group.layers]
    assert covered == list(range(len(pattern)))
    for group in pattern.groups:
        assert group.layers[0] == group.source
        assert {pattern.source_of(layer) for layer in group.layers} == {group.source}


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
        ("FXS", "Only F, S and L"),
        ("fsl", "capital"),
        ("SFFF", "starts with S"),
        ("SLLL", "starts with S"),
    ],
)
def test_bad_text_is_one_clear_error(text: str, message: str) -> None:
    with pytest.raises(PatternError, match=message):
        Pattern(text)


@given(st.text(max_size=12))
def test_only_f_s_and_l_not_starting_with_s_is_accepted(text: str) -> None:
    valid = bool(text) and set(text) <= {"F", "S", "L"} and text[0] != "S"
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


# -- folding --------------------------------------------------------------------------------------

letters = st.tuples(st.sampled_from("FL"), st.text("FSL", max_size=90)).map("".join)
suffixes = st.builds(
    Suffix,
    st.integers(1, MOST_CANDIDATES),
    st.just("") | st.text("0123456789abcdef", min_size=12, max_size=12),
)


@given(letters, suffixes)
def test_letters_and_suffix_come_back_as_they_were_written(text: str, suffix: Suffix) -> None:
    assert split_suffix(f"{text}{suffix}") == (text, suffix)
    folds = "L" in text or (suffix.factor > 1 and "F" in text)
    if (suffix.factor > 1 and "F" not in text) or (suffix.slopes and not folds):
        with pytest.raises(PatternError, match="Leave"):
            Pattern(f"{text}{suffix}")
        return
    pattern = Pattern(f"{text}{suffix}")
    assert (pattern.layers, pattern.suffix) == (text, suffix)
    assert str(pattern.with_suffix(suffix)) == str(pattern) == f"{text}{suffix}"
    assert pattern.is_folded is folds


@given(letters, st.sampled_from((1, 2, 64)))
def test_an_l_layer_selects_and_serves_as_an_f_layer_does(text: str, factor: int) -> None:
    """All but how it selects is that of the pattern with F in its place."""
    suffix = Suffix(factor if "F" in text else 1)
    pattern, exact = Pattern(f"{text}{suffix}"), Pattern(text.replace("L", "F"))
    assert pattern.sources == exact.sources
    assert pattern.groups == exact.groups
    assert pattern.full_layers == exact.full_layers
    assert pattern.shared_layers == exact.shared_layers
    assert pattern.retention == exact.retention
    assert pattern.to_indexer_types() == exact.to_indexer_types()
    for layer, letter in enumerate(text):
        assert pattern.is_full(layer) is (letter != "S")
        expected = {"F": suffix.factor if suffix.factor > 1 else 0, "L": 1, "S": 0}[letter]
        assert pattern.fold_at(layer) == expected
        assert exact.fold_at(layer) == 0


@given(st.text("FSL+cw@0128abcdef", max_size=30) | st.text(max_size=30))
def test_any_text_is_a_pattern_that_is_written_so_or_one_clear_error(text: str) -> None:
    try:
        pattern = Pattern(text)
    except PatternError:
        return
    assert str(pattern) == text == f"{pattern.layers}{pattern.suffix}"


@given(patterns)
def test_a_pattern_that_does_not_fold_is_what_it_always_was(pattern: Pattern) -> None:
    """Its text, and with that its digest, every key and every file."""
    assert str(pattern) == pattern.layers
    assert pattern.digest == sha256(pattern.layers.encode()).hexdigest()[:12]
    assert not pattern.is_folded
    pattern.check_unfolded("nobody")


def test_patterns_that_fold_otherwise_are_others() -> None:
    slopes = "@0123456789ab"
    texts = ("FFFF", "LFFF", "FLLL", f"FLLL{slopes}", "FFFF+c4", "FFFF+c8")
    texts += (f"FFFF+c4{slopes}", "FFFF+c4@0123456789ac")
    assert len({Pattern(text).digest for text in texts}) == len(texts)


@pytest.mark.parametrize(
    "text", ["FF+c", "FF+c0", "FF+c1", "FF+c04", "FF+c65", "FF+c999", "FF+c4+c4", "FF+8", "FF+"]
)
def test_bad_candidates_are_one_clear_error(text: str) -> None:
    with pytest.raises(
        PatternError, match=r"\+cN behind the pattern, with N from 2 to 64 .* full\+c4"
    ):
        Pattern(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("LS+c4", r"\+c4 is about F layers, and LS\+c4 has none"),
        ("FS@0123456789ab", "folds no layer"),
        ("FL@0123456789a", "contains '0'"),
        ("FL@0123456789AB", "contains '0'"),
        ("FS+w8", r"contains '\+'"),
        ("FL@MODEL.slopes", "by their digest, not by a file"),
    ],
)
def test_a_suffix_that_says_nothing_is_refused(text: str, message: str) -> None:
    with pytest.raises(PatternError, match=message):
        Pattern(text)


def test_a_name_may_name_a_file_of_slopes() -> None:
    assert split_suffix("1/4+c4@my/MODEL.slopes") == ("1/4", Suffix(4, "my/MODEL.slopes"))
    assert split_suffix("dir@v2/own.yaml+c8") == ("dir@v2/own.yaml", Suffix(8))


def test_folding_is_told_and_can_be_refused() -> None:
    assert "3 of 4" in Pattern("FLLS").summary()
    assert "2 of them folded" in Pattern("FLLS").summary()
    assert "choose among 4 k candidates" in Pattern("FFFS+c4").summary()
    for text in ("FLLL", "FFFS+c4"):
        with pytest.raises(PatternError, match=r"folds indexers, which a mill cannot do yet\."):
            Pattern(text).check_unfolded("a mill")


def test_checkpoints_that_lack_an_indexer_cannot_fold_there() -> None:
    with pytest.raises(PatternError, match="layers 1, 2 are F and L in the pattern"):
        Pattern("LFLL").check_checkpoint(Pattern("FSSF"))


def test_folded_and_folded_between_f_layers() -> None:
    shipped = Pattern("FFSFSFF")
    assert str(Pattern.folded(shipped)) == "LLSLSLL"
    assert str(Pattern.folded(shipped, 2)) == "FLSFSLF"
    assert str(Pattern.folded(Pattern.full(6), 4)) == "FLLLFL"
