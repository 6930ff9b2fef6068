"""Files of slopes, and how patterns name them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.random_model import make_model
from sglang_indexcache.adapter import Adapter
from sglang_indexcache.checkpoint import Checkpoint, pattern_from_sharing_keys
from sglang_indexcache.errors import CheckpointError, LibraryError, PatternError, SearchError
from sglang_indexcache.library import Library, Slopes, names_a_file
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.rules import Constraints, parse_targets
from tests.slopes import random_slopes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("glm")
    make_model(path, "glm-5", "tiny", vocab_size=512)
    return path


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint.read(folder)


@pytest.fixture
def slopes(folder: Path, tmp_path: Path) -> Slopes:
    return random_slopes(folder, tmp_path / "MODEL.slopes")


@pytest.mark.parametrize(
    ("value", "letters"),
    [
        ("LLSLFF", "LLSLFF"),
        ("full+c4", "FFFFFF+c4"),
        ("folded", "LLLLLL"),
        ("folded:1/4", "FLLLFL"),
        ("uniform:1/2+c2", "FSFSFS+c2"),
    ],
)
def test_any_form_of_a_pattern_may_name_them(
    checkpoint: Checkpoint, slopes: Slopes, value: str, letters: str
) -> None:
    library = Library([slopes.path.parent])
    by_file = library.resolve(f"{value}@{slopes.path}", checkpoint, folding=True)
    by_digest = library.resolve(f"{value}@{slopes.digest}", checkpoint, folding=True)
    assert by_file.pattern == by_digest.pattern == Pattern(f"{letters}@{slopes.digest}")
    assert by_file.slopes == by_digest.slopes == slopes


def test_whoever_does_not_fold_refuses_by_default(checkpoint: Checkpoint, slopes: Slopes) -> None:
    for value in ("LLLLLL", f"folded@{slopes.path}", f"full+c4@{slopes.path}"):
        with pytest.raises(PatternError, match="folds indexers, which this command cannot do yet"):
            Library([]).resolve(value, checkpoint)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("folded", "'folded' folds indexers and does not say by which slopes"),
        ("full+c4", "Fit them to the checkpoint .*: full\\+c4@FILE"),
        ("full@FILE", "names slopes and folds no layer"),
        ("folded:2/4@FILE", "folding between F layers is written folded:1/r"),
        ("folded:1/9@FILE", "'folded:1/9' wants one F layer in 9"),
    ],
)
def test_what_is_amiss_is_one_sentence(
    checkpoint: Checkpoint, slopes: Slopes, value: str, message: str
) -> None:
    value = value.replace("FILE", str(slopes.path))
    with pytest.raises(PatternError, match=message):
        Library([]).resolve(value, checkpoint, folding=True)


def test_a_pattern_file_names_slopes_beside_it(
    checkpoint: Checkpoint, slopes: Slopes, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    entry = {
        "name": "mine",
        "model": {
            "name": "tiny",
            "architectures": [checkpoint.architecture],
            "num_layers": 6,
        },
        "pattern": f"FLLSSS@{slopes.digest}",
        "full_layers": 3,
        "retention": "1/2",
        "method": {"name": "by hand"},
        "source": {"title": "a test"},
    }
    path.write_text(json.dumps(entry))
    choice = Library([]).resolve(str(path), checkpoint, folding=True)
    assert (choice.pattern, choice.slopes) == (Pattern(f"FLLSSS@{slopes.digest}"), slopes)
    assert choice.entry is not None
    slopes.path.rename(tmp_path / "moved")
    with pytest.raises(LibraryError, match=f"folds by the slopes {slopes.digest}, and no file in"):
        Library([]).resolve(str(path), checkpoint, folding=True)
    with pytest.raises(PatternError, match=r"says how to fold, and .* says it already"):
        Library([]).resolve(f"{path}@{'0' * 12}", checkpoint, folding=True)


def test_a_server_reads_no_file_for_others(checkpoint: Checkpoint, slopes: Slopes) -> None:
    with pytest.raises(PatternError, match="a server reads none for whoever can reach it"):
        Library([]).resolve(f"folded@{slopes.path}", checkpoint, files=False, folding=True)
    assert not names_a_file("folded:1/4")


def test_slopes_of_another_shape_are_refused(slopes: Slopes, tmp_path: Path) -> None:
    for number, fields in enumerate(({"index_n_heads": 4}, {"num_hidden_layers": 5})):
        folder = tmp_path / str(number)
        make_model(folder, "glm-5", "tiny", vocab_size=512, fields=fields)
        with pytest.raises(CheckpointError, match="is another model"):
            Library([]).resolve(f"folded@{slopes.path}", Checkpoint.read(folder), folding=True)


def test_slopes_of_other_weights_are_refused(slopes: Slopes) -> None:
    slopes.check_checkpoint(slopes.checkpoint, "here")
    with pytest.raises(CheckpointError, match="and here is another checkpoint"):
        slopes.check_checkpoint("0" * 64, "here")


def test_the_digest_is_of_slopes_checkpoint_and_what_stays_exact(
    folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.slopes"
    digests = [
        random_slopes(folder, path).digest,
        random_slopes(folder, path, seed=2).digest,
        random_slopes(folder, path, exact=[3]).digest,
    ]
    assert len(set(digests)) == 3
    content = json.loads(path.read_text())
    content["checkpoint"] = "0" * 64
    path.write_text(json.dumps(content))
    assert Slopes.read(path).digest not in digests
    content["record"] = {"anything": 1}
    path.write_text(json.dumps(content))
    assert Slopes.read(path).digest == Slopes.read(path).digest


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 2}', "\udcff"])
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "some.slopes"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(LibraryError, match="is no file of slopes"):
        Slopes.read(path)
    with pytest.raises(LibraryError, match="cannot read the slopes"):
        Slopes.read(tmp_path / "none.slopes")


def test_sglangs_own_key_a_search_and_an_adapter_do_not_fold(tmp_path: Path) -> None:
    with pytest.raises(PatternError, match="takes no folded layers"):
        pattern_from_sharing_keys({"index_topk_pattern": "FLLL"}, tuple(range(4)))
    for target in ("1/2+c4", "1/2@0123456789ab"):
        with pytest.raises(SearchError, match="over F and S layers"):
            parse_targets([target], Constraints.make(Pattern.full(12)))
    digest = "0" * 64
    (tmp_path / "adapter.yaml").write_text(
        json.dumps(
            {
                "format": 1,
                "pattern": "FLSS",
                "base": {"name": "x", "architecture": "y", "digest": digest, "shape": {}},
                "weights": digest,
            }
        )
    )
    with pytest.raises(PatternError, match="which an adapter cannot do yet"):
        Adapter.read(tmp_path)
