"""Versions of SGLang that will do: judged by digests of its source, told in a line or an error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_indexcache.errors import UnsupportedEngineError
from sglang_indexcache.serving import engine_version
from sglang_indexcache.serving.engine_version import EngineSource, Seam, check, moved
from tests.record_seams import record

MODULE = "sglang.srt.thing"


def source(folder: Path, code: str, version: str | None = None) -> EngineSource:
    """Return an SGLang below ``folder`` whose module ``srt/thing.py`` is ``code``."""
    srt = folder / "sglang" / "srt"
    srt.mkdir(parents=True)
    (srt / "thing.py").write_text(code)
    return EngineSource(srt.parent, version)


# -- what will do ------------------------------------------------------------------------------

NAMES = tuple("abcdefgh")
CODE = "".join(f"def {name}(x):\n    return {name!r}\n\n\n" for name in NAMES)
SEAMS = tuple(Seam(MODULE, name, f"for {name}") for name in NAMES)

Make = Callable[..., EngineSource]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    count = iter(range(100))

    def an_sglang(version: str | None, code: str = CODE) -> EngineSource:
        return source(tmp_path / str(next(count)), code, version)

    return an_sglang


@pytest.fixture(autouse=True)
def one_tested_version(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> EngineSource:
    """1.0 is recorded and installed."""
    version = make("1.0")
    monkeypatch.setattr(engine_version, "seams", lambda: SEAMS)
    monkeypatch.setattr(engine_version, "RECORDS", tmp_path / "seams.json")
    monkeypatch.setattr(EngineSource, "installed", classmethod(lambda cls: version))
    record(version)
    return version


def changed(*names: str, code: str = CODE) -> str:
    for name in names:
        code = code.replace(f"return {name!r}", "return None")
    return code


def test_the_tested_version_starts_without_a_word(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    check(make("1.0"))
    assert caplog.records == []


def test_a_file_that_is_the_tested_one_is_not_parsed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files take two seconds of every start; the record alone says that this one is right."""
    digests = engine_version.recorded()[1]
    assert moved(make("1.0", CODE + "# more\n"), digests | {f"{MODULE}.a": "other"}) == [
        f"{MODULE}.a has changed"
    ]
    monkeypatch.setattr(EngineSource, "digest", lambda *_: None)
    assert moved(make("1.1"), digests) == []
    assert len(moved(make("1.1", CODE + "# more\n"), digests)) == len(SEAMS)


def test_another_version_starts_with_one_line_if_nothing_moved(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        check(make("1.1", f"# new\n{CODE}def z(): ...\n"))
    assert caplog.messages == [
        "IndexCache: SGLang 1.1 was not tested; everything that IndexCache relies on is as in 1.0"
    ]


def test_another_version_is_refused_with_what_moved(make: Make) -> None:
    code = changed("a").replace("def c(", "def no(")
    with pytest.raises(UnsupportedEngineError) as error:
        check(make("1.1", code))
    message = str(error.value)
    assert "SGLang 1.1 was not tested, and of the 8 places" in message
    assert "2 differ from 1.0: " in message
    for problem in ("a has changed", "c is gone"):
        assert f"{MODULE}.{problem}" in message
    assert "more" not in message
    assert "pip install 'sglang==" in message


def test_an_error_names_the_first_that_moved_and_counts_the_others(make: Make) -> None:
    with pytest.raises(UnsupportedEngineError, match=r"e has changed; and 3 more\.") as error:
        check(make("1.1", changed(*NAMES)))
    assert f"{MODULE}.f " not in str(error.value)


def test_a_changed_installation_is_to_be_reinstalled(make: Make) -> None:
    message = r"this SGLang 1\.0 is not the one .*h has changed.*--force-reinstall 'sglang==1\.0'"
    with pytest.raises(UnsupportedEngineError, match=message):
        check(make("1.0", changed("h")))


def test_a_seam_that_was_not_recorded_says_how(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_version, "seams", lambda: (*SEAMS, Seam(MODULE, "z", "")))
    with pytest.raises(UnsupportedEngineError, match=r"z is not recorded \(python -m tests.rec"):
        check(make("1.0", f"{CODE}z = 1\n"))


def test_recording_again_is_the_same_again(make: Make, one_tested_version: EngineSource) -> None:
    first = engine_version.RECORDS.read_text()
    record(make("1.1", changed("a")))
    assert engine_version.recorded()[0] == "1.1"
    assert moved(one_tested_version, engine_version.recorded()[1]) == [f"{MODULE}.a has changed"]
    record(one_tested_version)
    assert engine_version.RECORDS.read_text() == first


def test_what_the_table_names_wrongly_is_not_recorded(make: Make) -> None:
    with pytest.raises(UnsupportedEngineError, match="cannot be recorded"):
        record(make("1.1", CODE.replace("def a", "def z")))
    assert engine_version.recorded()[0] == "1.0"


# -- what a digest sees ------------------------------------------------------------------------

FUNCTION = "def f(a, *, b=1):\n    return g(a, [b], f'{a:>3}')\n"
CLASS = "class C:\n    x: int = 0\n    def m(self):\n        return 'y'\n"

Digest = Callable[..., str | None]


@pytest.fixture
def digest(tmp_path: Path) -> Digest:
    count = iter(range(100))

    def of(code: str, name: str, by_signature: bool = False) -> str | None:
        seam = Seam(MODULE, name, "", by_signature=by_signature)
        return source(tmp_path / f"digest-{next(count)}", code).digest(seam)

    return of


@pytest.mark.parametrize(
    ("name", "code", "equivalent"),
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
def test_a_digest_does_not_see(name: str, code: str, equivalent: str, digest: Digest) -> None:
    assert digest(code, name) == digest(equivalent, name)
    assert digest(code, name) is not None


@pytest.mark.parametrize(
    ("name", "code", "changed"),
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
def test_a_digest_sees(name: str, code: str, changed: str, digest: Digest) -> None:
    assert digest(code, name) != digest(changed, name)
    assert digest(changed, name) is not None


def test_by_signature_only_the_parameters_count(digest: Digest) -> None:
    inside = FUNCTION.replace("return", "yield")
    assert digest(FUNCTION, "f") != digest(inside, "f")
    assert digest(FUNCTION, "f", by_signature=True) == digest(inside, "f", by_signature=True)
    added = FUNCTION.replace("*", "c, *")
    assert digest(FUNCTION, "f", by_signature=True) != digest(added, "f", by_signature=True)


def test_a_digest_is_the_same_in_every_python(digest: Digest) -> None:
    """One Python checks what another recorded, so the value itself is held here."""
    assert digest(FUNCTION, "f") == "1d9f124faa8f7550"
    assert digest(CLASS, "C") == "27f5fa3991381149"


def test_what_is_not_there_has_no_digest(tmp_path: Path) -> None:
    engine = source(tmp_path, CLASS)
    assert engine.digest(Seam(MODULE, "C.gone", "")) is None
    assert engine.digest(Seam("sglang.srt.nowhere", "C", "")) is None
