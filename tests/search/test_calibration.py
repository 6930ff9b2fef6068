import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_indexcache.errors import SearchError
from sglang_indexcache.search.calibration import Calibration, Split, is_held_out, prepare

END = 0


def encode(text: str) -> list[int]:
    """A tokenizer of one token a character."""
    return [ord(c) for c in text]


def made(source: Path | str, **arguments: int) -> Split:
    wanted = {"context": 8, "batches": 3, "per_batch": 2, "held_out": 1} | arguments
    return prepare(str(source), encode, END, **wanted)  # type: ignore[arg-type]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    rows = [{"text": f"line {i:04}"} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return path


def test_packs_the_first_sequences_of_each_part(lines: Path) -> None:
    split = made(lines)
    stream = [token for i in range(20) for token in [*encode(f"line {i:04}"), END]]
    cut = [tuple(stream[i : i + 8]) for i in range(0, len(stream) - 7, 8)]
    parts = [[s for s in cut if is_held_out(s) is kind] for kind in (False, True)]
    assert {*split.calibration.sequences} == {*parts[0][:6]}
    assert {*split.held_out.sequences} == {*parts[1][:2]}
    assert split.calibration.batch_tokens == (16, 16, 16)
    assert split.held_out.batch_tokens == (16,)


COUNTS = st.tuples(*[st.integers(1, 6)] * 4)


@given(seed=st.integers(0, 99), other=st.integers(0, 99), counts=COUNTS)
def test_no_two_commands_mix_the_parts(seed: int, other: int, counts: tuple[int, ...]) -> None:
    """Whatever their batch counts and seeds; once a shuffle of what was asked for cut them."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "data.txt"
        path.write_text("".join(f"line {i:05}\n" for i in range(200)))
        mine = made(path, seed=seed, batches=counts[0], held_out=counts[1])
        later = made(path, seed=other, batches=counts[2], held_out=counts[3])
    assert not set(mine.calibration.sequences) & set(later.held_out.sequences)


def test_one_sequence_in_four_is_held_out() -> None:
    assert 900 < sum(is_held_out((i, i + 1)) for i in range(4000)) < 1100


def test_is_the_same_every_time_and_another_with_another_seed(lines: Path) -> None:
    assert made(lines) == made(lines)
    assert made(lines).calibration.digest == made(lines).calibration.digest
    assert made(lines).calibration.digest != made(lines, seed=1).calibration.digest


def test_the_digest_sees_tokens_and_batching() -> None:
    base = Calibration(((1, 2), (3, 4)), 1, "x")
    assert base.digest == Calibration(((1, 2), (3, 4)), 1, "y").digest
    others = [(((1, 2), (3, 5)), 1), (((1, 2), (3, 4)), 2), (((1, 23), (4, 4)), 1)]
    assert all(Calibration(s, n, "x").digest != base.digest for s, n in others)


def test_reads_every_format(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    text = "abcdefghij" * 10
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": text}))
    messages = [{"role": "user", "content": text[:50]}, {"role": "assistant", "content": text[51:]}]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": messages}))
    parquet.write_table(pa.table({"text": [text]}), tmp_path / "d.parquet")
    plain = made(tmp_path / "a.txt").calibration.sequences
    assert made(tmp_path / "b.jsonl").calibration.sequences == plain
    assert made(tmp_path / "d.parquet").calibration.sequences == plain
    assert made(tmp_path / "c.jsonl").calibration.sequences  # joined by a newline, so others
    assert made(tmp_path, batches=16, held_out=4).calibration.batches  # the folder: all of them


def test_the_machines_own_text() -> None:
    assert made("machine", context=100).calibration.context == 100


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "contains no text"),
        ("blank.jsonl", b"\n \n", "contains no text"),
        ("short.txt", b"a" * 30, "is too short: of 6 sequences of 8 tokens to search on it"),
        ("latin.txt", "café".encode("latin-1"), "not UTF-8 .byte 3 is 0xe9"),
        ("broken.jsonl", b'{"text": "a"}\n{"text', "line 2 is not JSON"),
        ("fields.jsonl", b'{"body": "a"}', "line 1 has no text: expected a string, one of text"),
        ("broken.parquet", b"PAR1 not", "is not a parquet file"),
    ],
)
def test_bad_data(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SearchError, match=message):
        made(tmp_path / name)


def test_no_data_and_no_size(tmp_path: Path) -> None:
    with pytest.raises(SearchError, match="there is no calibration data at"):
        made(tmp_path / "missing")
    with pytest.raises(SearchError, match="context of at least 2 tokens"):
        made(tmp_path, context=1)
