"""Reading an SGLang: what a digest sees and what not, and where the source may lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_indexcache.errors import UnsupportedEngineError
from sglang_indexcache.serving.engine_version import EngineSource
from sglang_indexcache.serving.seams import Seam
from tests.serving.sglang_tree import MODULE, source, wheel, write

FUNCTION = "def f(a, *, b=1):\n    return g(a, [b], f'{a:>3}')\n"
CLASS = "class C:\n    x: int = 0\n    def m(self):\n        return 'y'\n"

Digest = Callable[..., str | None]


@pytest.fixture
def digest(tmp_path: Path) -> Digest:
    count = iter(range(100))

    def of(code: str, name: str, by_signature: bool = False) -> str | None:
        seam = Seam(MODULE, name, "", by_signature=by_signature)
        return source(tmp_path / str(next(count)), code).digest(seam)

    return of


@pytest.mark.parametrize(
    ("name", "code", "same"),
    [
        ("f", FUNCTION, FUNCTION.replace("a, *", "  # why\n    a,\n    *")),
        ("f", FUNCTION, FUNCTION.replace("\n   ", '\n    """What."""\n\n   ', 1)),
        ("f", FUNCTION, f"import os\n\n\n{FUNCTION}\ndef g(): ..."),
        ("C", CLASS, CLASS.replace("x: int = 0", 'x: int = 0\n    """What."""')),
        ("C.m", CLASS, CLASS.replace("= 0", "= 1")),
        ("C.x", CLASS, CLASS.replace("'y'", "'z'")),
        ("n", "from a import n", "from a import (\n    m,\n    n,\n)"),
        ("f", FUNCTION, "if x:\n" + "".join(f"    {line}\n" for line in FUNCTION.splitlines())),
    ],
)
def test_a_digest_does_not_see(name: str, code: str, same: str, digest: Digest) -> None:
    assert digest(code, name) == digest(same, name)
    assert digest(code, name) is not None


@pytest.mark.parametrize(
    ("name", "code", "other"),
    [
        ("f", FUNCTION, FUNCTION.replace("b=1", "b=True")),
        ("f", FUNCTION, FUNCTION.replace("b=1", "b='1'")),
        ("f", FUNCTION, FUNCTION.replace(">3", ">4")),
        ("f", FUNCTION, FUNCTION.replace("*, ", "")),
        ("f", FUNCTION, f"@cache\n{FUNCTION}"),
        ("f", FUNCTION, f"async {FUNCTION}"),
        ("f", FUNCTION, f"{FUNCTION}\nif x:\n    def f(): ...\n"),
        ("f", FUNCTION, f"{FUNCTION}\ntry: pass\nexcept E:\n    f = None\n"),
        ("C", CLASS, CLASS.replace("'y'", "'z'")),
        ("C.x", CLASS, CLASS.replace("= 0", "= False")),
        ("n", "from a import n", "from .a import n"),
        ("n", "from a import n", "from a import m as n"),
        ("n", "n = 1", "n: int = 1"),
        ("n", "n = None", "n = 'None'"),
    ],
)
def test_a_digest_sees(name: str, code: str, other: str, digest: Digest) -> None:
    assert digest(code, name) != digest(other, name)
    assert digest(other, name) is not None


def test_by_signature_only_the_parameters_count(digest: Digest) -> None:
    inside = FUNCTION.replace("return", "yield")
    assert digest(FUNCTION, "f") != digest(inside, "f")
    assert digest(FUNCTION, "f", by_signature=True) == digest(inside, "f", by_signature=True)
    added = FUNCTION.replace("*", "c, *")
    assert digest(FUNCTION, "f", by_signature=True) != digest(added, "f", by_signature=True)


def test_a_digest_is_the_same_in_every_python(digest: Digest) -> None:
    """What one Python recorded, another checks; so the value itself is held here."""
    assert digest(FUNCTION, "f") == "1d9f124faa8f7550"
    assert digest(CLASS, "C") == "27f5fa3991381149"


def test_what_is_not_there_has_no_digest(tmp_path: Path) -> None:
    here = source(tmp_path, CLASS)
    assert here.digest(Seam(MODULE, "C.gone", "")) is None
    assert here.digest(Seam("sglang.srt.nowhere", "C", "")) is None
    assert here.has_module(Seam(MODULE, "C.gone", ""))
    assert not here.has_module(Seam("sglang.srt.nowhere", "C", ""))


def test_parameters_of_a_function(tmp_path: Path) -> None:
    here = source(tmp_path, f"{FUNCTION}{CLASS}")
    assert here.parameters(Seam(MODULE, "f", "")) == {"a", "b"}
    assert here.parameters(Seam(MODULE, "C", "")) is None


def test_every_place_leads_to_the_same_source(tmp_path: Path) -> None:
    packages = write(tmp_path / "site-packages", FUNCTION, "0.5.99")
    checkout = tmp_path / "checkout"
    write(checkout / "python", FUNCTION)
    seam = Seam(MODULE, "f", "")
    places: dict[Path, str | None] = {
        packages: "0.5.99",
        packages / "sglang": "0.5.99",
        wheel(packages, tmp_path / "sglang-0.5.99-py3-none-any.whl"): "0.5.99",
        checkout: None,
        checkout / "python": None,
        checkout / "python" / "sglang": None,
    }
    found = {place: EngineSource.at(place) for place in places}
    assert {place: one.version for place, one in found.items()} == places
    assert len({one.digest(seam) for one in found.values()}) == 1
    assert found[packages].name == "SGLang 0.5.99"
    assert str(checkout) in found[checkout].name


def test_any_other_place_is_one_clear_error(tmp_path: Path) -> None:
    other = tmp_path / "other-1.0-py3-none-any.whl"
    (tmp_path / "empty").mkdir()
    text = tmp_path / "sglang.tar.gz"
    text.touch()
    for place in (
        wheel(tmp_path / "empty", other),
        tmp_path / "empty",
        tmp_path / "nowhere",
        text,
        write(tmp_path / "holder", "") / "sglang" / "srt",
    ):
        with pytest.raises(UnsupportedEngineError, match=r"there is no SGLang in .*Name a wheel"):
            EngineSource.at(place)
