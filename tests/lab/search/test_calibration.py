import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_indexcache.errors import SearchError
from sglang_indexcache.lab.data import documents
from sglang_indexcache.lab.data.marking import Marker, is_held_out
from sglang_indexcache.lab.search.calibration import Calibration, Score
from sglang_indexcache.lab.search.reading import prepare
from sglang_indexcache.lab.search.recall import KEYS, PASSAGES, TEXT
from tests.lab.data.letters import Letters, letters, text_of

RULE = r"\n(\w+) (\w+) -> (\w+), (\w+)"
SIZES = {"context": 8, "batches": 6, "held_out": 2}


def prepare_letters(source: Path | str, **arguments: Any) -> Calibration:
    return prepare(str(source), letters(), **(SIZES | arguments))


def write(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write(tmp_path / "data.jsonl", ({"text": f"line{i:04}"} for i in range(40)))


def test_the_two_parts_are_what_their_tokens_say(lines: Path) -> None:
    data = prepare_letters(lines)
    rows = {tuple(map(ord, f"line{i:04}")) for i in range(40)}
    assert len({*data.sequences}) == 8
    assert {*data.sequences} <= rows
    assert [is_held_out(s) for s in data.sequences] == [False] * 6 + [True] * 2
    assert data.batch_tokens == (8,) * 8
    assert data.size == "6 batches of 8 tokens"
    alone = data.held_out_alone()
    assert (alone.sequences, alone.held_out, len(alone.kinds)) == (data.sequences[6:], 0, 2)
    assert alone.documents == data.documents[6:]


def five_kinds(folder: Path) -> dict[str, Path]:
    """Write a folder for each of five kinds of text, with six files of twenty documents each."""
    for kind in "abcde":
        for number in range(6):
            rows = ({"text": f"{kind}{number}{i:06}"} for i in range(20))
            (folder / kind).mkdir(exist_ok=True)
            write(folder / kind / f"{number}.jsonl", rows)
    return {kind: folder / kind for kind in "abcde"}


def test_documents_come_from_every_folder_and_file(tmp_path: Path) -> None:
    """Five kinds were given once, and two files of one of them searched: the first by name."""
    five_kinds(tmp_path)
    data = prepare_letters(tmp_path, batches=20, held_out=0)
    texts = [text_of(sequence) for sequence in data.sequences]
    assert {text[0] for text in texts} == set("abcde")
    assert len({text[:2] for text in texts}) >= 15
    assert "files in 5 folders, drawn by seed 0" in data.reading
    assert data.warning == ""


def test_another_seed_draws_other_documents(tmp_path: Path) -> None:
    """It only shuffled the same ones once, and the page said that it showed how stable they are."""
    five_kinds(tmp_path)
    drawn = [{*prepare_letters(tmp_path, seed=seed).sequences} for seed in range(4)]
    for one, other in itertools.combinations(drawn, 2):
        assert len(one & other) <= 2
    # And from everywhere in one file.
    write(tmp_path / "one.jsonl", ({"text": f"x{i:07}"} for i in range(1000)))
    places = [
        int(text_of(s)[1:])
        for seed in range(4)
        for s in prepare_letters(tmp_path / "one.jsonl", seed=seed).sequences
    ]
    assert min(places) < 250
    assert max(places) > 750


def test_few_files_and_windows_of_few_texts_are_warned_of(tmp_path: Path) -> None:
    for number in range(8):
        text = "".join(f"{number}{i:07}" for i in range(100))
        (tmp_path / f"{number}.txt").write_text(text)
    few = prepare_letters(tmp_path, batches=30, held_out=0)
    assert "all 30 sequences come from" in few.warning
    assert "texts of" in few.warning
    assert len(set(few.documents)) <= 8
    enough = prepare_letters(tmp_path, batches=4, held_out=0)
    assert enough.warning == ""
    assert len(set(enough.documents)) == 4  # a window of each, before any gives two
    free = next(
        f
        for f in sorted(tmp_path.iterdir())
        if f.stem in {s[0] for s in map(text_of, few.sequences)}
    )
    alone = prepare_letters(free, batches=4, held_out=0)
    assert "all 4 sequences come from 1 text of 1 file: " in alone.warning
    many = prepare_letters(tmp_path, batches=1, held_out=2)
    compared = many.held_out_alone()
    assert "1 sequences" in many.warning
    assert "1 sequences" not in compared.warning
    assert "compared on 2 texts" in compared.reading
    assert len(set(alone.documents)) == 1


COUNTS = st.tuples(*[st.integers(1, 6)] * 4)


@settings(deadline=None)
@given(
    seed=st.integers(0, 99),
    other_seed=st.integers(0, 99),
    counts=COUNTS,
    score=st.sampled_from([None, *Score]),
)
def test_no_two_commands_mix_the_parts(
    seed: int, other_seed: int, counts: tuple[int, ...], score: Score | None
) -> None:
    """Whatever their batch counts, scores and seeds; once a shuffle of what was asked cut them."""
    with TemporaryDirectory() as folder:
        rows = ({"prompt": "line", "response": f" {i:03}"} for i in range(200))
        path = write(Path(folder) / "data.jsonl", rows)
        mine = prepare_letters(path, seed=seed, batches=counts[0], held_out=counts[1])
        later = prepare_letters(
            path, seed=other_seed, batches=counts[2], held_out=counts[3], score=score
        )
    sequences = mine.sequences[: counts[0]]
    assert not set(sequences) & set(later.held_out_alone().sequences)


def test_one_sequence_in_four_is_held_out() -> None:
    assert 900 < sum(is_held_out((i, i + 1)) for i in range(4000)) < 1100


def test_is_the_same_every_time_and_another_with_another_seed(lines: Path) -> None:
    assert prepare_letters(lines).digest == prepare_letters(lines).digest
    assert prepare_letters(lines).digest != prepare_letters(lines, seed=1).digest


def test_the_digest_sees_tokens_and_what_counts() -> None:
    base = Calibration(((1, 2), (3, 4)), "x")
    assert base.digest == Calibration(((1, 2), (3, 4)), "y").digest
    variants = [((1, 2), (3, 5)), ((1, 23), (4, 4))]
    assert all(Calibration(sequences, "x").digest != base.digest for sequences in variants)
    longer = ((1, 2, 3), (4, 5, 6))
    kinds = [
        (np.array([1, late], dtype=np.uint8), np.array([1, 1], dtype=np.uint8))
        for late in (1, 0, 2)
    ]
    digests = [Calibration(longer, "x", kinds=kind).digest for kind in kinds]
    assert digests[0] == Calibration(longer, "x").digest
    assert len({*digests}) == 3


def test_every_batch_counts_something() -> None:
    kinds = (np.array([1], dtype=np.uint8), np.array([0], dtype=np.uint8))
    with pytest.raises(SearchError, match="no prediction of calibration batch 1 counts"):
        Calibration(((1, 2), (3, 4)), "x", kinds=kinds)
    assert Calibration(((1, 2), (3, 4)), "x", kinds=kinds[:1] * 2).counts == "1"


# -- documents stay whole ----------------------------------------------------------------------


def test_two_documents_are_never_glued(tmp_path: Path) -> None:
    """They were once joined by an end token and cut anywhere."""
    rows = [{"text": chr(97 + i % 26) * (5 + i % 4)} for i in range(60)]
    data = prepare_letters(write(tmp_path / "a.jsonl", rows))
    texts = {row["text"] for row in rows}
    for sequence in data.sequences:
        assert text_of(sequence) in texts


def test_an_answer_keeps_its_evidence(tmp_path: Path) -> None:
    """The key is at the start, what asks for it at the end; once a cut could part them."""
    rows = [{"prompt": f"{i:02}...", "response": f"={i:02}"} for i in range(40)]
    rows += [{"prompt": f"too long for the context {i}", "response": "=no"} for i in range(40)]
    data = prepare_letters(write(tmp_path / "a.jsonl", rows), score=Score.ANSWERS)
    for sequence in data.sequences:
        text = text_of(sequence)
        assert text[:2] == text[-2:]
    assert re.search(r"\d left out with answers and more than 8 tokens", data.reading)


def test_a_long_text_gives_consecutive_windows(tmp_path: Path) -> None:
    texts = ["".join(f"{i:04}" for i in range(start, start + 100)) for start in (0, 200, 400)]
    data = prepare_letters(
        write(tmp_path / "a.jsonl", ({"text": text} for text in texts)), held_out=0
    )
    windows = {text[i : i + 8] for text in texts for i in range(0, len(text), 8)}
    assert {text_of(s) for s in data.sequences} <= windows
    assert "texts cut into windows" in data.reading


def test_all_windows_of_a_text_are_on_one_side(tmp_path: Path) -> None:
    """Six of eight held-out windows were of documents whose other windows were searched on."""
    texts = ["".join(chr(300 + 40 * i + j) for j in range(40)) for i in range(60)]
    path = write(tmp_path / "a.jsonl", ({"text": text} for text in texts))
    data = prepare_letters(path, batches=40, held_out=20)
    of = {character: place for place, text in enumerate(texts) for character in text}
    sides = [
        {of[chr(token)] for sequence in part for token in sequence}
        for part in (data.sequences[:40], data.held_out_alone().sequences)
    ]
    assert min(map(len, sides)) > 3
    assert not sides[0] & sides[1]
    with pytest.raises(SearchError, match=r"All windows of one text .* Give several files or doc"):
        prepare_letters(write(tmp_path / "one.jsonl", [{"text": "a long text" * 99}]))
    number = next(n for n in range(99) if is_held_out(tuple(map(ord, f"{n:02}" * 99))))
    with pytest.raises(SearchError, match=r"Give several files or documents\.$"):
        prepare_letters(write(tmp_path / "held.jsonl", [{"text": f"{number:02}" * 99}]), held_out=0)


def test_a_huge_text_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read in pieces, which were called texts, and a quarter of them held out."""
    monkeypatch.setattr(documents, "TEXT_PIECE", 50)
    sides = set()
    for number in range(10, 20):
        path = tmp_path / f"{number}.txt"
        path.write_text("".join(f"{number}{i:06}\n" for i in range(100)))
        first = tuple(map(ord, path.read_text()[:54]))  # to the end of a line
        sides.add(is_held_out(first))
        for seed in range(3):
            with pytest.raises(SearchError, match="All windows of one text are on one side"):
                prepare_letters(path, batches=1, held_out=1, seed=seed)
        if not is_held_out(first):
            data = prepare_letters(path, held_out=0)
            assert len(set(data.documents)) == 1
            assert "come from 1 text of 1 file" in data.warning
            assert data.reading.startswith("1 document read from 1 file")
    assert sides == {False, True}


def test_windows_of_one_text_are_not_held_out_to_judge_by(tmp_path: Path) -> None:
    """They were planned, costed and compared, and then no interval was possible."""
    texts = [f"{number}" * 9 for number in range(100, 140)]
    held = [text for text in texts if is_held_out(tuple(map(ord, text)))][:2]
    free = [text for text in texts if not is_held_out(tuple(map(ord, text)))][:6]
    for name, text in enumerate([*free, held[0]]):
        (tmp_path / f"{name}.txt").write_text(text)
    with pytest.raises(SearchError, match=r"holds out one text.*--held-out 0"):
        prepare_letters(tmp_path)
    data = prepare_letters(tmp_path, least_held_out=0)
    assert (data.held_out, len(data.sequences)) == (0, 6)
    assert "no pattern is measured on it" in data.held_out_warning
    (tmp_path / "further.txt").write_text(held[1])
    assert prepare_letters(tmp_path).held_out == 2


def test_a_copy_is_no_further_document(tmp_path: Path) -> None:
    """Some texts under many names gave an interval over many documents, and no warning."""
    texts = ["".join(f"{n}{i:03}" for i in range(20)) for n in range(8)]
    free = [text for text in texts if not is_held_out(tuple(map(ord, text)))]
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(texts[number % 8])
    (folder / "linked.txt").symlink_to(folder / "0.txt")
    rows = write(tmp_path / "a.jsonl", ({"text": texts[n % 8]} for n in range(41)))
    for source in (folder, rows):
        data = prepare_letters(source, batches=2 * len(free) + 1, held_out=0)
        assert len(set(data.documents)) == len(free)
        assert "41 documents read" in data.reading
        assert "33 left out as copies of others" in data.reading
        assert "sequences come from" in data.warning
        assert len(set(data.sequences)) == len(data.sequences)


def test_only_the_windows_that_are_wanted_are_made(tmp_path: Path) -> None:
    """Facts were hidden in each of a book's hundreds of windows, which took most of the time."""
    texts = [{"text": f"{n:04}" * 2000} for n in range(8)]
    tokenizer = Letters()
    source = str(write(tmp_path / "a.jsonl", texts))
    prepare(source, Marker(tokenizer, "letters"), context=64, batches=2)
    assert tokenizer.characters < 8 * 8000 + 8 * 1000


def test_as_many_are_held_out_as_there_are_if_fewer_will_do(tmp_path: Path) -> None:
    rows = [{"text": f"text{n:04}"} for n in range(900)]
    held_out_counts = [
        sum(is_held_out(tuple(map(ord, row["text"]))) for row in rows[:n]) for n in range(901)
    ]

    def held_out(rows_with: int, least: int | None = 2) -> int:
        path = write(tmp_path / "a.jsonl", rows[: held_out_counts.index(rows_with)])
        sizes = {"batches": 2, "held_out": 128, "least_held_out": least}
        return prepare_letters(path, **sizes).held_out

    assert [held_out(count) for count in (3, 50, 128, 200)] == [3, 50, 128, 128]
    for count, least in ((3, 4), (127, None)):
        with pytest.raises(SearchError, match=f"to hold out {count}"):
            held_out(count, least)


def test_long_documents_come_first_and_then_the_longest_of_the_short(tmp_path: Path) -> None:
    short = [{"text": f"{i % 10}" * (1 + i % 3)} for i in range(30)]
    long = [{"text": f"{i:06}"} for i in range(3)]
    data = prepare_letters(write(tmp_path / "a.jsonl", short + long), batches=4, held_out=0)
    free = [row for row in long if not is_held_out(tuple(map(ord, row["text"])))]
    lengths = sorted(len(s) for s in data.sequences)
    assert lengths == [3] * (4 - len(free)) + [6] * len(free)
    assert 0 < len(free) < 4
    assert f"{4 - len(free)} of 4 sequences under half of 8" in data.reading


def test_stops_reading_when_there_is_enough(tmp_path: Path) -> None:
    """A file is read whole when its turn comes, and no text is tokenized that is not wanted."""
    for number in range(1000):
        write(tmp_path / f"{number:03}.jsonl", ({"text": f"n{number:03}{i:04}"} for i in range(9)))
    tokenizer = Letters()
    reading = prepare(str(tmp_path), Marker(tokenizer, "letters"), **SIZES).reading
    assert "drawn by seed 0 (reading stopped there: these give enough)" in reading
    assert tokenizer.characters < 6000


def test_what_sees_no_more_than_is_selected_is_left_out(tmp_path: Path) -> None:
    rows = [{"text": f"{i:04}"} for i in range(20)] + [{"text": f"{i:07}"} for i in range(40)]
    data = prepare_letters(write(tmp_path / "a.jsonl", rows), topk=4, score=Score.ALL)
    assert {len(s) for s in data.sequences} == {7}
    assert [kinds.tolist() for kinds in data.kinds] == [[0] * 4 + [TEXT] * 2] * 8
    sentence = r"\d left out because nothing that counts sees more than 4 tokens"
    assert re.search(sentence, data.reading)


# -- what counts -------------------------------------------------------------------------------


def test_only_answers_count_where_the_data_marks_them(tmp_path: Path) -> None:
    """Every token once did."""
    rows = [{"text": f"no{i:04}"} for i in range(40)]
    rows += [{"text": f"k {i:04} ", "answers": [[2, 4], [5, 6]]} for i in range(40)]
    calibration = prepare_letters(write(tmp_path / "a.jsonl", rows))
    assert calibration.objective.score is Score.ANSWERS
    for sequence, mask in zip(calibration.sequences, calibration.kinds, strict=True):
        assert np.flatnonzero(mask).tolist() == [1, 2, 4]
        assert text_of(sequence).startswith("k ")
    assert re.search(r"\d left out without answers", calibration.reading)
    assert calibration.counts == "3"


def test_passages_come_again_where_nothing_is_marked(tmp_path: Path) -> None:
    """They replace each text's end; what is held out and how long texts are does not change.

    Facts take more letters than a text of 64 spares.
    """
    path = write(tmp_path / "a.jsonl", [{"text": f"{n:04}" * 16} for n in range(40)])
    plain, by_recall = (
        prepare_letters(path, context=64, score=Score.LATE),
        prepare_letters(path, context=64),
    )
    assert by_recall.objective.score is Score.RECALL
    assert by_recall.batch_tokens == plain.batch_tokens
    for text, sequence in zip(plain.sequences, by_recall.sequences, strict=True):
        assert sequence[:48] == text[:48]
        assert text_of(sequence[48:]) in text_of(sequence[:48])
    assert by_recall.kinds[0].tolist() == [0] * 23 + [TEXT] * 24 + [0] * 4 + [PASSAGES] * 12


def test_keys_and_rules_are_asked_for_where_nothing_is_marked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": f"{n:04}" * 500} for n in range(20)])
    data = prepare_letters(path, context=2000, batches=2, held_out=0)
    assert data.judged_on == "text, passages, keys"
    assert {len(sequence) for sequence in data.sequences} == {2000}
    for sequence, kinds in zip(data.sequences, data.kinds, strict=True):
        text = text_of(sequence)
        notes = dict(re.findall(r"\n# (\w+) is (\w+)\n", text))
        asked = dict(re.findall(r"\n\? (\w+) is (\w+)", text))
        assert len(notes) == 6
        assert notes == asked
        rule = [[*line[:2], *line[2:][::-1]] for line in re.findall(RULE, text)]
        assert len(rule) == 6
        assert all(line[:2] == line[2:] for line in rule)
        answers = text_of([t for t, kind in zip(sequence[1:], kinds, strict=True) if kind == KEYS])
        assert len(answers) == sum(len(value) + 1 for value in asked.values()) + sum(
            len(f" {b}, {a}") for a, b, *_ in rule[-2:]
        )


def test_the_later_half_counts_alone_if_it_is_asked_for(lines: Path) -> None:
    calibration = prepare_letters(lines, score=Score.LATE)
    assert calibration.kinds[0].tolist() == [0] * 3 + [TEXT] * 4
    assert prepare_letters(lines, score=Score.ALL).kinds[0].all()


def test_what_the_data_marks_is_seen_in_its_first_hundred_documents(tmp_path: Path) -> None:
    plain = [{"text": f"line{i:04}"} for i in range(100)]
    with_responses = [{"prompt": "k", "response": f"{i:04}"} for i in range(40)]
    path = write(tmp_path / "a.jsonl", plain + with_responses)
    assert prepare_letters(path).objective.score is Score.ANSWERS
    assert prepare_letters(write(tmp_path / "b.jsonl", plain)).objective.score is Score.RECALL


def test_answers_that_nobody_marked(lines: Path) -> None:
    with pytest.raises(SearchError, match=r"no document of .* marks an answer.*--score late"):
        prepare_letters(lines, score=Score.ANSWERS)


def test_the_machines_own_text() -> None:
    calibration = prepare_letters("machine", context=100)
    assert {len(s) for s in calibration.sequences} == {100}
    assert calibration.size == "6 batches of 100 tokens"


def test_what_sees_too_little_needs_more_context(tmp_path: Path) -> None:
    """A shorter context was advised, or several files where there were many."""
    path = write(tmp_path / "a.jsonl", ({"text": f"{i:020}"} for i in range(20)))
    for context in (4, 20):
        with pytest.raises(SearchError, match=r"longer documents, and a longer context"):
            prepare_letters(path, context=context, topk=20)


def test_too_little(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a" * 6)
    with pytest.raises(
        SearchError, match=r"too little: of 6 sequences of up to 8 tokens.*shorter context"
    ):
        prepare_letters(tmp_path / "short.txt")
    long = write(
        tmp_path / "long.jsonl", ({"prompt": f"key{n}", "response": "a" * 8} for n in range(9))
    )
    with pytest.raises(SearchError, match=r"9 left out with answers and.*longer context"):
        prepare_letters(long)
    with pytest.raises(SearchError, match="context of at least 2 tokens"):
        prepare_letters(tmp_path, context=1)
