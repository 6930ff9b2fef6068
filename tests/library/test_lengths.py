"""Token counts as people write them."""

import pytest

from sglang_indexcache.errors import SettingsError
from sglang_indexcache.library.lengths import format_length, parse_length


@pytest.mark.parametrize("text", ["1", "4096", "200K", "16Ki", "1000Ki"])
def test_lengths_are_read_and_written(text: str) -> None:
    assert parse_length(format_length(parse_length(text))) == parse_length(text)


@pytest.mark.parametrize("text", ["", "0", "-1", "4k", "1.5K", "Ki", "\u0664", "\uff14K"])
def test_a_bad_length(text: str) -> None:
    with pytest.raises(SettingsError, match="a length is a number"):
        parse_length(text)


@pytest.mark.parametrize(("text", "suggestion"), [("32k", "32K"), ("16ki", "16Ki"), ("4KI", "4Ki")])
def test_a_length_that_is_nearly_one(text: str, suggestion: str) -> None:
    with pytest.raises(SettingsError, match=f"Did you mean {suggestion}"):
        parse_length(text)


def test_a_length_of_more_digits_than_python_reads() -> None:
    with pytest.raises(SettingsError, match="a length is a number") as error:
        parse_length("9" * 5000)
    assert len(str(error.value)) < 250
