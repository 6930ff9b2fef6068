"""Token counts as people write them."""

import pytest

from sglang_indexcache.errors import SettingsError
from sglang_indexcache.support.lengths import format_length, parse_length


@pytest.mark.parametrize("text", ["1", "4096", "200K", "16Ki", "1000Ki"])
def test_lengths_are_read_and_written(text: str) -> None:
    assert parse_length(format_length(parse_length(text))) == parse_length(text)


@pytest.mark.parametrize("text", ["", "0", "-1", "4k", "1.5K", "Ki"])
def test_a_bad_length(text: str) -> None:
    with pytest.raises(SettingsError, match="a length is a number"):
        parse_length(text)
