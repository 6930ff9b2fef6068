"""Pictures: written whole, in the format of their suffix."""

from pathlib import Path

import pytest

from sglang_indexcache.errors import SettingsError
from sglang_indexcache.lab.runs.plots import FULL, make_figure, pattern_color, save_figure
from sglang_indexcache.pattern import Pattern


def test_axes_come_in_reading_order(tmp_path: Path) -> None:
    figure, axes = make_figure(4, 3, rows=2, columns=3, sharex=True)
    assert len(axes) == 6
    for number, axis in enumerate(axes):
        axis.set_title(str(number))
    assert [axis.get_title() for axis in figure.axes] == [str(number) for number in range(6)]
    path = tmp_path / "deep" / "figure.png"
    save_figure(figure, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in path.parent.iterdir()] == ["figure.png"]


@pytest.mark.parametrize(
    ("suffix", "begins"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")]
)
def test_the_suffix_decides_and_the_bytes_are_the_same_again(
    suffix: str, begins: bytes, tmp_path: Path
) -> None:
    pictures = []
    for name in ("once", "again"):
        figure, [axis] = make_figure(2, 2)
        axis.plot([0, 1], [1, 0])
        save_figure(figure, tmp_path / f"{name}{suffix}")
        pictures.append((tmp_path / f"{name}{suffix}").read_bytes())
    assert pictures[0].startswith(begins)
    assert pictures[0] == pictures[1]


def test_another_format_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    figure, _ = make_figure(2, 2)
    with pytest.raises(SettingsError, match=r"written as \.png, \.pdf, \.svg"):
        save_figure(figure, tmp_path / "figure.jpg")
    assert not list(tmp_path.iterdir())


def test_a_pattern_has_one_colour_whatever_its_length() -> None:
    assert pattern_color(Pattern.full(47)) == pattern_color(Pattern.full(12)) == FULL
    for ratio in (2, 4, 8):
        uniform = [pattern_color(Pattern.uniform(layers, ratio)) for layers in (12, 47, 78)]
        assert len(set(uniform)) == 1
    irregular = ["FFFSFFSFSSSS", "FFFSSSSSSSSS", "FFSSSSSSSSSS"]
    interleaved = ["FSFSFSFSFSFS", "FSSSFSSSFSSS", "FSSSSSFSSSSS"]
    assert len({pattern_color(Pattern(text)) for text in (*irregular, *interleaved)}) == 6


def test_a_pdf_has_truetype_fonts(tmp_path: Path) -> None:
    """IEEE, AAAI and others refuse matplotlib's default, Type 3."""
    figure, [axis] = make_figure(2, 2)
    axis.set_title("layers")
    save_figure(figure, tmp_path / "a.pdf")
    content = (tmp_path / "a.pdf").read_bytes()
    assert b"/FontFile2" in content  # where a PDF keeps a TrueType font
    assert b"/Type3" not in content
