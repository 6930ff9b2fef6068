"""The checks of a card: their dry run as a whole, and that each of them can fail."""

import importlib
import json
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.card import __main__ as card
from benchmarks.card import graphs, kernels, pack, sanitized, served, speed, start
from benchmarks.card.checks import CHECKS, Check
from benchmarks.card.claims import Report
from benchmarks.card.fake_server import FakeServer
from benchmarks.children import Finished
from sglang_indexcache.ask.client import Client
from sglang_indexcache.errors import ServerError
from tests.dry_run import dry_run

NEEDS_A_GPU = {
    "our CUDA kernels compile",
    "compute-sanitizer finds nothing in our CUDA kernels",
}


def number(name: str) -> Check:
    return next(check for check in CHECKS if check.name == name)


def outcomes(name: str, capsys: pytest.CaptureFixture[str], dry: bool = True) -> dict[str, Any]:
    """Run a check here: its claims, as it says them."""
    module = importlib.import_module(f"benchmarks.card.{name}")
    capsys.readouterr()
    module.run(Report(number(name).claims, dry, seconds=100))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    return {line["claim"]: line for line in map(json.loads, lines) if "claim" in line}


def refuted(found: dict[str, Any]) -> list[str]:
    return [name for name, line in found.items() if line["outcome"] == "refuted"]


@pytest.fixture
def sglang() -> None:
    pytest.importorskip("sglang")
    if torch.accelerator.is_available():
        pytest.skip("dry checks are for the CPU platform")


# -- the run as a whole ----------------------------------------------------------------------------


def test_dry_run(tmp_path: Path, sglang: None) -> None:
    """One command, every check, and nothing that reads as proven."""
    out, said = dry_run(tmp_path)
    report = json.loads(out.read_text())
    assert report["dry"] is True
    assert set(report["machine"]) >= {"name", "capability", "torch", "cuda", "commit", "triton"}
    claims = {n: c for entry in report["checks"].values() for n, c in entry["claims"].items()}
    assert set(claims) == {name for check in CHECKS for name in check.claims}
    for name, claim in claims.items():
        wanted = "not reached" if name in NEEDS_A_GPU else "dry"
        assert claim["outcome"] == wanted, (name, claim)
    assert "DRY RUN" in said
    assert "proven" not in said


def line(claim: str, outcome: str = "proven") -> dict[str, Any]:
    return {"claim": claim, "outcome": outcome, "why": "", "evidence": {}}


CHECK = Check(5, "capture", ("first", "second"), 60, 10)


@pytest.mark.parametrize(
    ("lines", "problem", "outcome", "late"),
    [
        ([{"begin": "second"}], "exit code -11", "refuted", False),
        ([{"begin": "second"}], "stopped after 60 s", "not reached", True),
        ([], "exit code 1", "not reached", False),
        ([], None, "not reached", False),
        ([line("second", "refuted")], None, "refuted", False),
        ([line("second")], None, "proven", False),
    ],
)
def test_every_claim_has_an_outcome(
    lines: list[dict[str, Any]], problem: str | None, outcome: str, late: bool
) -> None:
    """A crash in the middle of a claim counts against it; what was not begun is not reached."""
    found = card.entry(CHECK, Finished([line("first"), *lines], problem, "Segmentation fault"))
    assert found["claims"]["first"]["outcome"] == "proven"
    assert found["claims"]["second"]["outcome"] == outcome
    assert found["late"] is late
    if problem:
        decided = any("claim" in one for one in lines)
        assert decided or "Segmentation fault" in found["claims"]["second"]["why"]


def run_card(
    monkeypatch: pytest.MonkeyPatch,
    out: Path,
    perform: Callable[..., Any],
    *options: str,
) -> int:
    monkeypatch.setattr("sys.argv", ["card", "--dry", "--out", str(out), *options])
    monkeypatch.setattr(card, "perform", perform)
    return card.main()


def held(check: Check, *_: Any) -> dict[str, Any]:
    return card.entry(check, Finished([line(name, "dry") for name in check.claims], None, ""))


def test_a_second_call_adds_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, ran = tmp_path / "card.json", []

    def perform(check: Check, *_: Any) -> dict[str, Any]:
        ran.append(check.number)
        if check.number == 5 and ran.count(5) == 1:
            return card.entry(check, Finished([], "stopped after 90 s", ""))
        return held(check)

    assert run_card(monkeypatch, out, perform, "--only", "3,5") == 0
    assert "not asked for yet" in capsys.readouterr().out
    assert run_card(monkeypatch, out, perform) == 0
    assert ran == [3, 5, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11]
    assert set(json.loads(out.read_text())["checks"]) == {str(check.number) for check in CHECKS}


def test_one_refuted_claim_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def perform(check: Check, *_: Any) -> dict[str, Any]:
        if check.number != 6:
            return held(check)
        return card.entry(check, Finished([{"begin": check.claims[0]}], "exit code -6", "abort"))

    assert run_card(monkeypatch, tmp_path / "card.json", perform) == 1
    assert "refuted   6  breakable prefill" in capsys.readouterr().out


def test_another_run_s_file_is_not_added_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "card.json"
    assert run_card(monkeypatch, out, held, "--only", "1") == 0
    report = json.loads(out.read_text())
    report["machine"]["commit"] = "another"
    out.write_text(json.dumps(report))
    with pytest.raises(SystemExit, match="is of another run"):
        run_card(monkeypatch, out, held)


def test_no_gpu_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["card"])
    assert card.main() == 2
    assert "use --dry" in capsys.readouterr().err


# -- each check can fail ---------------------------------------------------------------------------


def test_start_tells_what_does_not_load(
    sglang: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "EVERYWHERE", {"torch": "torch", "no_such_package": "nothing"})
    monkeypatch.setattr(start, "resolved", lambda: None)
    loose = SimpleNamespace(attention_backend="triton")
    monkeypatch.setattr(start, "configuration", lambda _: (loose, None))
    found = outcomes("start", capsys)
    assert refuted(found) == list(number("start").claims)
    assert "no_such_package" in found[number("start").claims[0]]["why"]


def test_without_an_archive_nothing_is_claimed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "find_spec", lambda _: None)
    monkeypatch.setattr(start, "resolved", lambda: start.need("no_such_package"))
    found = outcomes("start", capsys)
    assert {line["outcome"] for line in found.values()} == {"not reached"}


def test_kernels_that_fail_the_grid(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = {"passed": 3, "failed": {"case": ["wrong"]}, "problem": None}
    groups = dict.fromkeys(("topk", "indexer_prefill", "indexer_decode", "sparse_mla"), failed)
    monkeypatch.setattr(kernels, "check", lambda *_, **__: {"reference": groups})
    assert refuted(outcomes("kernels", capsys)) == list(number("kernels").claims[1:])


@pytest.mark.parametrize("op", ["select", "topk", "sparse_mla"])
def test_a_kernel_that_keeps_what_it_saw_at_capture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], op: str
) -> None:
    """As one that read lengths on the host, or kept a copy of its inputs, would."""
    original = graphs.Replayed

    def frozen(body: Callable[[], Any], dry: bool) -> Any:
        made = original(body, dry)
        if body.__closure__ and f"{op} " in str(body.__closure__[0].cell_contents):
            kept = [one.clone() for one in body.__closure__[0].cell_contents.outputs]
            made._body = lambda: [
                out.copy_(old)
                for out, old in zip(body.__closure__[0].cell_contents.outputs, kept, strict=True)
            ]
        return made

    monkeypatch.setattr(graphs, "Replayed", frozen)
    found = outcomes("graphs", capsys)
    assert refuted(found) == list(number("graphs").claims)
    assert all(op in line["why"] and "differs" in line["why"] for line in found.values())


def test_key_only_writes_other_bytes(
    sglang: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer

    original = Indexer._get_k_bf16
    monkeypatch.setattr(Indexer, "_get_k_bf16", lambda *a, **k: original(*a, **k) * 1.02)
    found = outcomes("keys", capsys)
    assert refuted(found) == [number("keys").claims[0]]
    assert "neox" in found[number("keys").claims[0]]["why"]


def test_keys_in_another_layout(
    sglang: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.card import keys

    def shifted(pool: Any, layer_id: int, loc: Any, index_k: Any, index_k_scale: Any) -> None:
        keys.write_pages(pool.pages, loc ^ 1, index_k, index_k_scale.flatten())

    monkeypatch.setattr(keys.Pool, "set_index_k_scale_buffer", shifted)
    assert refuted(outcomes("keys", capsys)) == list(number("keys").claims)


def test_indices_of_a_warm_up_in_a_captured_stage(
    sglang: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The buffer as it once was: it adopted carried indices in the first pass only."""
    from sglang_indexcache.serving.index_buffer import IndexBuffer

    original = IndexBuffer.resolve

    def once(buffer: Any, layer: int, selected: Any) -> Any:
        if not buffer.is_full(layer) and buffer._indices is not None:
            return buffer.shared(layer)
        return original(buffer, layer, selected)

    monkeypatch.setattr(IndexBuffer, "resolve", once)
    assert refuted(outcomes("capture", capsys)) == [number("capture").claims[1]]


def test_sub_batches_that_read_the_wrong_rows(
    sglang: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sglang_indexcache.serving.index_buffer import IndexBuffer

    original = IndexBuffer.inherit

    def flipped(part: IndexBuffer, layer: int, whole: Any, rows: Any, before: int) -> None:
        original(part, layer, whole, rows, before)
        if part._indices is not None:
            part._indices = part._indices.flip(0)

    monkeypatch.setattr(IndexBuffer, "inherit", flipped)
    found = refuted(outcomes("capture", capsys))
    assert number("capture").claims[2] in found
    assert number("capture").claims[0] not in found


def test_rows_that_take_what_the_capture_gave_them(
    sglang: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sglang_indexcache.serving.cuda.graph_variants import GraphVariants

    monkeypatch.setattr(GraphVariants, "_write_masks", lambda variants, patterns: None)
    assert refuted(outcomes("capture", capsys)) == [number("capture").claims[3]]


def test_a_prefill_that_replays_the_captured_indices(
    sglang: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sglang_indexcache.serving.cuda.backend import IndexCacheBackend

    original, first = IndexCacheBackend._indices, {}

    def stale(backend: Any, layer: int, batch: Any, selected: Any) -> Any:
        found = original(backend, layer, batch, selected)
        kept = first.setdefault((id(backend), layer), found.clone())
        return kept[: len(found)]

    monkeypatch.setattr(IndexCacheBackend, "_indices", stale)
    assert refuted(outcomes("breakable", capsys)) == list(number("breakable").claims)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda out: out.copy_(torch.where(out >= 0, out ^ 64, out)), "of its own tokens"),
        (lambda out: out[:, :1].fill_(-1), "of its own tokens"),
    ],
)
def test_a_selection_of_other_tokens(
    sglang: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[torch.Tensor], Any],
    why: str,
) -> None:
    from benchmarks.card import metadata

    reference = metadata.named("reference").load("select")

    def wrong(*arguments: Any, out: torch.Tensor, **options: Any) -> torch.Tensor:
        reference(*arguments, out=out, **options)
        spoil(out)
        return out

    bad = SimpleNamespace(obstacle=lambda *_: None, load=lambda _: wrong)
    monkeypatch.setattr(metadata, "named", lambda _: bad)
    found = outcomes("metadata", capsys)
    assert refuted(found) == list(number("metadata").claims)
    assert all(why in line["why"] for line in found.values())


class Broken(FakeServer):
    """A server with one fault."""

    fault = ""

    def __init__(self, arguments: list[str], log: Path, *, env: Any = None) -> None:
        super().__init__(arguments, log, env=env)
        self.is_stock = "--json-model-override-args" in arguments
        self.is_live = "live" in arguments
        self.asked = 0

    def wait_until_ready(self, timeout: float) -> Client:
        if self.fault == "does not start" and not self.is_stock:
            raise ServerError("the server ended with exit code 1: KeyError")
        if self.fault == "starts too slowly" and not self.is_stock:
            raise ServerError("the server was not ready after 240 s")
        if self.fault == "stock does not start" and self.is_stock:
            raise ServerError("exit code 1: no FlashAttention 3")
        return super().wait_until_ready(timeout)

    def tokens(self, ids: list[int], count: int) -> list[int]:
        self.asked += 1
        found = super().tokens(ids, count)
        if self.fault == "one other token" and not self.is_stock:
            found[-1] += 1
        if self.fault == "stock is unstable" and self.is_stock:
            found[0] += self.asked
        return found

    def switch(self, pattern: str) -> None:
        if self.fault != "does not switch":
            super().switch(pattern)

    def state(self) -> dict[str, Any]:
        found = super().state()
        if self.fault == "runs every indexer":
            found["indexer_selections"] = [self.forwards] * len(self.pattern)
        return found


SERVED, TOKENS, LIVE = number("served").claims


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("", ("dry", "dry", "dry")),
        ("one other token", ("dry", "refuted", "dry")),
        ("stock is unstable", ("dry", "not reached", "dry")),
        ("stock does not start", ("dry", "not reached", "dry")),
        ("does not start", ("refuted", "not reached", "not reached")),
        ("starts too slowly", ("not reached", "not reached", "not reached")),
        ("runs every indexer", ("refuted", "dry", "refuted")),
        ("does not switch", ("dry", "dry", "refuted")),
    ],
)
def test_served(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: str,
    expected: tuple[str, str, str],
) -> None:
    monkeypatch.setattr(served, "FakeServer", Broken)
    monkeypatch.setattr(Broken, "fault", fault)
    found = outcomes("served", capsys)
    assert tuple(found[name]["outcome"] for name in (SERVED, TOKENS, LIVE)) == expected


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        ({"memcheck topk": {"cases": 5, "problem": None}}, "proven"),
        ({"memcheck topk": {"cases": 5, "problem": "exit code 9"}}, "refuted"),
        ({"memcheck topk": {"cases": 1, "problem": "stopped after 9 s"}}, "not reached"),
        ({"problem": "compute-sanitizer is not installed"}, "not reached"),
    ],
)
def test_sanitized(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    said: dict[str, Any],
    outcome: str,
) -> None:
    monkeypatch.setattr(sanitized, "sanitize", lambda _: said)
    (line,) = outcomes("sanitized", capsys, dry=False).values()
    assert line["outcome"] == outcome


def test_speed_without_a_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speed, "microseconds_of_a_layer", lambda: 1.0)
    monkeypatch.setattr(speed, "warm", lambda *_, **__: {})
    nothing = {"results": [], "ended_the_process": {"cuda": "exit code 1"}, "not_measured": []}
    monkeypatch.setattr(speed, "time_all", lambda *_, **__: nothing)
    assert refuted(outcomes("speed", capsys)) == [number("speed").claims[0]]


# -- the archive -----------------------------------------------------------------------------------


def test_what_travels() -> None:
    one = pack.Carried("a", "", keep=("a/*",), drop=("*.so", "a/test/*"))
    paths = ("a/x.py", "b/x.py", "a/x.so", "a/test/x.py")
    assert [path for path in paths if pack.wanted(path, one)] == ["a/x.py"]


@pytest.mark.parametrize(
    ("path", "fits"),
    [
        ("a/core.cpython-312-x86_64-linux-gnu.so", True),
        ("a/core.cpython-311-x86_64-linux-gnu.so", False),
        ("a/core.abi3.so", True),
        ("a/lib/libplain.so", True),
        ("a/core.py", True),
    ],
)
def test_compiled_files_must_fit(path: str, fits: bool) -> None:
    assert (pack.misfit(path) is None) == fits


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The files that every distribution has."""
    files = {"a/__init__.py": b"x = 1\n", "a/test/big.py": b"0" * 100}
    monkeypatch.setattr(pack, "download", lambda *_: Path("a.whl"))
    monkeypatch.setattr(pack, "files_of_wheel", lambda _: iter(files.items()))
    return files


def test_collect(wheels: dict[str, bytes], tmp_path: Path) -> None:
    one = pack.Carried("a", "because", version="1", drop=("a/test/*",))
    files, rows = pack.collect([one], tmp_path)
    assert files == {"a/__init__.py": b"x = 1\n"}
    (row,) = rows
    assert (row["name"], row["version"], row["bytes"], row["why"]) == ("a", "1", 6, "because")
    wheels["a/__init__.py"] = b"x = 2\n"
    assert pack.collect([one], tmp_path)[1][0]["sha256"] != row["sha256"]


def test_collect_refuses_what_does_not_belong(wheels: dict[str, bytes], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has torch already"):
        pack.collect([pack.Carried("torch", "", version="2.11.0")], tmp_path)
    pack.collect([pack.Carried("torch", "", version="2.14.1")], tmp_path)
    wheels["a/core.cpython-311-x86_64-linux-gnu.so"] = b""
    with pytest.raises(SystemExit, match="is for cpython-311"):
        pack.collect([pack.Carried("a", "", version="1")], tmp_path)


def test_the_limits() -> None:
    assert pack.too_large(50_000_000, 10_000_000) is None
    assert "the archive has" in str(pack.too_large(60_000_001, 0))
    assert "archive and repository" in str(pack.too_large(55_000_000, 12_000_000))


def test_stubs_say_why_when_they_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "left_behind"
    folder.mkdir()
    (folder / "__init__.py").write_text(pack.stub_source(pack.Stub("left_behind", "too large")))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("left_behind")
    with pytest.raises(ImportError, match=r"left_behind\.Thing was not carried: too large"):
        module.Thing(1)
    assert not hasattr(module, "__path_hook__")


def test_the_archive_can_be_made_again(tmp_path: Path) -> None:
    files = {"b/x.py": b"2", "a/x.py": b"1"}
    for name in ("one", "two"):
        pack.write_archive(files, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    with lzma.open(tmp_path / "one") as packed, tarfile.open(fileobj=packed) as archive:
        assert archive.getnames() == ["a/x.py", "b/x.py"]


def test_the_plugin_is_found_where_only_the_tree_is() -> None:
    metadata = pack.own_metadata()
    (entry_points,) = (data for path, data in metadata.items() if path.endswith("entry_points.txt"))
    assert b"sglang_indexcache.serving.plugin:register" in entry_points
