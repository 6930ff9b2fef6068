"""Table 1 from a report to the pages, layer costs from slices, and what the driver leaves out."""

from __future__ import annotations

import json
import multiprocessing
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import readme
from benchmarks.card import phases, plugin, record, served, servers, slices, table_1
from benchmarks.card.served import STOCK
from benchmarks.card.shapes import CARD, REHEARSAL, write_config
from benchmarks.card.table_1 import ARMS, GATE, Run, arguments, room
from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.library.resolve import Library

SECONDS = {10_000: 0.5, 200_000: 20.0}
GAIN = {"": 1.0, "1/2": 1.4, "1/4": 1.8, "1/8": 2.0}
"""Made up, as every figure here."""


def report(folder: Path, *, without: tuple[str, ...] = ()) -> phases.Report:
    """Write what a call leaves in which every arm was measured."""
    built = phases.Report(folder)
    built.add(GATE, {"code": 0, "seconds": 9.0, "said": "answers", "evidence": {"flags": []}})
    for arm in ARMS:
        if arm.name in without:
            built.add(arm.name, {"code": phases.SKIPPED, "seconds": 0, "said": "no time"})
            continue
        samples: list[dict[str, Any]] = []
        for length, seconds in SECONDS.items():
            gain = GAIN[arm.retention]
            if arm.work == "full":
                samples.append({"length": length, "full": 200 * gain, "requests": 4})
            else:
                figures = {"prefill": seconds / gain, "decode": 100 * gain}
                samples += [{"length": length, **figures}] * 3
        evidence: dict[str, Any] = {"samples": samples, "pattern": "FSSS"}
        if arm.name == STOCK:
            evidence["seen"] = {"indexer seconds": 12.0, "length": 200_000}
        built.add(arm.name, {"code": 0, "seconds": 50.0, "said": "x", "evidence": evidence})
    return built


def content_of(folder: Path) -> dict[str, Any]:
    return served.merge([json.loads((folder / "report.json").read_text())], None)


def test_a_report_goes_all_the_way_to_the_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report(tmp_path / "out")
    written = tmp_path / "results" / record.RECORD
    monkeypatch.setattr(
        sys, "argv", ["record", str(tmp_path / "out"), "--fresh", "--output", str(written)]
    )
    record.main()
    results = tmp_path / "results"
    (results / served.RECORD).parent.mkdir(parents=True)
    written.with_name("table_1.json").rename(results / served.RECORD)
    pages = {page: (readme.ROOT / page).read_text() for page in readme.PAGES}
    for name in ("table-1", "table-1-line", "table-1-slices"):
        assert any(f"generated:{name} " in text for text in pages.values()), name
    line = readme.render("table-1-line", results)
    assert line.startswith("1.80x in prefill and 1.80x in decode at 1/4 and 200K tokens")
    assert readme.render("table-1-line", tmp_path).strip() == "not measured"
    table = readme.render("table-1", results)
    assert "19.5, 20" in table
    assert "10.7 (1.82x), 11.1 (1.80x)" in table
    assert "253 (1.28x), " not in table, "the full cache of 1/2 is not measured"
    assert "could gain 1.82x, and gains 1.80x, 99% of that" in table
    assert "Not measured: slices of the 30B, slices of GLM-5." in table


def test_a_rehearsal_is_recorded_and_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = report(tmp_path / "out", without=("ours, 1/8",))
    table_1.check_same(built, rehearse=True, flags=[])
    built.add("full cache, 1/4", {"code": 1, "seconds": 3.0, "said": "died"})
    written = tmp_path / "results" / "h100.json"
    monkeypatch.setattr(sys, "argv", ["record", str(tmp_path / "out"), "--output", str(written)])
    record.main()
    assert [path.name for path in written.parent.iterdir()] == ["rehearsal.json"]
    content = json.loads(written.with_name("rehearsal.json").read_text())
    assert content["steps"][STOCK] == {"code": 0, "seconds": 50.0}, "no sample"
    line = served.rehearsed(content)
    assert f"torch {content['machine']['torch']}" in line
    assert f"6 of {len(served.STEPS)} steps went through" in line
    others = ("ours, 1/8", "full cache, 1/4", *slices.SLICES)
    assert line.endswith(f"not: {'; '.join(others)}.\n")


def test_what_has_passed_stays_and_what_was_skipped_is_missing(tmp_path: Path) -> None:
    report(tmp_path / "a", without=("ours, 1/8",))
    first = content_of(tmp_path / "a")
    assert "Not measured: ours, 1/8, slices" in served.table(first)
    bad = report(tmp_path / "b", without=tuple(arm.name for arm in ARMS if arm.name != "ours, 1/8"))
    bad.add(STOCK, {"code": 1, "seconds": 3.0, "said": "died"})
    both = served.merge([json.loads(bad.path.read_text())], first)
    assert both["steps"][STOCK]["code"] == 0
    assert both["steps"]["ours, 1/8"]["code"] == 0
    other = json.loads(bad.path.read_text())
    other["machine"]["torch"] = "another"
    with pytest.raises(ValueError, match="differ"):
        served.merge([other], first)


def test_layer_costs_are_found_and_a_sum_that_is_none_shows() -> None:
    true = {"constant": 0.02, "F": 0.4, "S": 0.1}
    patterns = slices.patterns_of(8)
    assert patterns == ["F" * 8, "FS" * 4, "FSSS" * 2, "F" + "S" * 7, "FSFS"]

    def seconds(pattern: str) -> float:
        return 0.02 + sum(true[layer] for layer in pattern)

    costs = slices.fit({pattern: seconds(pattern) for pattern in patterns})
    assert costs == pytest.approx({**true, "residual": 0}, abs=1e-9)
    assert slices.whole(costs, 47, 12, 8192, 1) == pytest.approx(0.02 + 12 * 0.4 + 35 * 0.1)
    talk = slices.whole(costs, 78, 22, 8192, 8) - slices.whole(costs, 78, 22, 8192, 1)
    assert talk == pytest.approx(78 * 2 * 0.4e-3)
    curved = {pattern: seconds(pattern) + 0.05 * pattern.count("F") ** 2 for pattern in patterns}
    assert slices.fit(curved)["residual"] > 0.02


def test_no_arm_begins_that_does_not_fit(tmp_path: Path) -> None:
    report = phases.Report(tmp_path)
    run = Run(report, REHEARSAL, tmp_path, time.monotonic() + 30, ())
    assert run.skips("ours, 1/4", 60)
    words = report.content["steps"]["ours, 1/4"]["said"]
    assert words == "it takes 60 s (a guess), and 30 were left"
    assert not run.skips("ours, 1/4", 20)
    assert report.exit_code() == 0


def test_a_recorded_time_of_such_a_card_stands_for_a_guess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / table_1.RECORD
    record.parent.mkdir(parents=True)
    steps = {STOCK: {"code": 0, "seconds": 71.5}, "ours, 1/4": {"code": 1, "seconds": 3.0}}
    record.write_text(json.dumps({"machine": {"name": "CPU"}, "steps": steps}))
    monkeypatch.setattr(table_1, "RESULTS", tmp_path)
    run = Run(phases.Report(tmp_path / "out"), REHEARSAL, tmp_path, 0.0, ())
    run.report.machine["name"] = "CPU"
    assert list(run.schedule())[:3] == [
        "by second 90: gate (90 s, a guess)",
        "by second 162: stock, all F (72 s, recorded)",
        "by second 222: ours, 1/4 (60 s, a guess)",
    ]
    run.report.machine["name"] = "another card"
    assert not any("recorded" in line for line in run.schedule())
    run.report.add(GATE, {"code": 0, "seconds": 9.0, "said": "answers"})
    assert next(run.schedule()).startswith("by second 95: stock, all F")


def test_servers_of_the_card_are_asked_for_what_the_page_says(tmp_path: Path) -> None:
    config = write_config(tmp_path, CARD.model, 47)
    content = json.loads((config / "config.json").read_text())
    assert content["num_hidden_layers"] == 47
    assert content["quantization_config"]["weight_block_size"] == [128, 128]
    stock, ours = (arguments(CARD, config, pattern, "single", ()) for pattern in ("", "1/4"))
    assert "dsa" in stock
    assert [word for word in ours if word not in stock] == [
        "indexcache",
        "--indexcache-pattern",
        "1/4",
    ]
    assert [room(CARD, length) for length in CARD.lengths] == [80, 13, 6, 4]
    full = arguments(CARD, config, "", "full", ("--last", "word"))
    place = full.index("--cuda-graph-bs-decode")
    assert full[place + 1 :] == ["4", "6", "13", "80", "--last", "word"]
    assert sum(arm.guess for arm in ARMS) + table_1.GATE_GUESS + table_1.PACKING_SECONDS < 560


def test_a_retention_is_the_library_s_pattern_for_the_paper_s_model(tmp_path: Path) -> None:
    config = write_config(tmp_path, CARD.model, 47) / "config.json"
    checkpoint, library = Checkpoint.from_config(json.loads(config.read_text())), Library.default()
    patterns = [library.resolve(name, checkpoint).pattern for name in ("1/2", "1/4", "1/8")]
    assert [len(pattern.full_layers) for pattern in patterns] == [24, 12, 7]


def test_a_stopped_server_has_no_process_that_lives(tmp_path: Path) -> None:
    server = servers.HeldServer([], tmp_path)
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', "
    child += "'import time; time.sleep(60)']); time.sleep(60)"
    server.command = [sys.executable, "-c", child]
    server.start()
    group = server.pid
    assert servers._lives(group)
    server.stop(grace=0)
    assert not servers._lives(group)


def test_every_server_knows_every_token_that_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of GLM-5 has an eighth of the vocabulary."""
    prompts: list[list[int]] = []
    monkeypatch.setattr(table_1, "stream", lambda _client, asked, _tokens: prompts.extend(asked))
    Run(phases.Report(tmp_path), CARD, tmp_path, 0.0, ()).ask(None, 10_000, 2)  # type: ignore[arg-type]
    assert max(map(max, prompts)) < CARD.glm_5["vocab_size"] < CARD.model["vocab_size"]


def test_a_rank_s_widths_fit_fp8_blocks() -> None:
    for name in ("moe_intermediate_size", "intermediate_size", "hidden_size", "q_lora_rank"):
        assert CARD.glm_5[name] % 128 == 0, name


def test_caches_are_taken_over_only_where_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = dict.fromkeys(servers._FITS, "1")
    for variable in servers._CACHE_VARIABLES:
        monkeypatch.setenv(variable, "")
    caches = tmp_path / "first" / "caches"
    monkeypatch.setattr(servers, "CACHES", caches)
    assert servers.keep_caches(here) == "no compiled kernels were carried"
    (caches / "triton").mkdir(parents=True)
    (caches / "triton" / "kernel").write_text("made")
    servers.pack_caches(here, tmp_path / "caches.tar.xz")
    kit = tmp_path / "kit"
    with tarfile.open(tmp_path / "caches.tar.xz") as archive:
        archive.extractall(kit, filter="data")
    monkeypatch.setattr(sys, "path", [*sys.path, str(kit)])
    monkeypatch.setattr(servers, "CACHES", tmp_path / "second" / "caches")
    assert "nvcc differ" in servers.keep_caches({**here, "nvcc": "2"})
    assert servers.keep_caches(here) == "carried kernels are taken"
    assert (tmp_path / "second" / "caches" / "triton" / "kernel").read_text() == "made"


def test_a_held_process_ends_with_its_server(tmp_path: Path) -> None:
    """A killed call takes the server along; what that had started waited on for minutes."""
    server = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0.5,))
    server.start()
    with pytest.raises(SystemExit, match="ended before"):
        plugin._wait_for(tmp_path / "begin", server)


def test_the_plugin_is_found_by_its_folder_alone(tmp_path: Path) -> None:
    from importlib.metadata import distributions

    (found,) = distributions(path=[str(plugin.site(tmp_path))])
    (entry,) = found.entry_points
    assert entry.load() is plugin.register


def test_a_server_is_asked_when_the_next_one_has_imported() -> None:
    seen: list[str] = []

    class Noted:
        is_started = False

        def __init__(self, name: str) -> None:
            self.name = name

        def __getattr__(self, method: str) -> Any:
            return lambda **_: seen.append(f"{method} {self.name}")

    with servers.lineup([]) as turns:
        assert list(turns) == [], "all is done already"
    first = Noted("a")
    first.is_started = True  # it imported while the gate was asked
    with servers.lineup([first, Noted("b")]) as turns:  # type: ignore[list-item]
        for server in turns:
            seen.append(f"ask {server.name}")  # type: ignore[attr-defined]
    held = ["begin a", "start b", "wait_until_held b", "ask a", "stop a"]
    assert seen[:8] == [*held, "start b", "begin b", "ask b"]


def test_a_server_is_held_when_each_of_its_processes_says_so(tmp_path: Path) -> None:
    server = servers.HeldServer([], tmp_path)
    server.wait_until_held()  # it has not been started
    lays = "import pathlib, sys, time\nfor name in 'ab': (pathlib.Path(sys.argv[1]) / "
    lays += "f'held.{name}').touch(); time.sleep(1)\ntime.sleep(60)"
    server.command = [sys.executable, "-c", lays, str(tmp_path)]
    server.start()
    server.wait_until_held()
    assert len(list(tmp_path.glob("held.*"))) == 2
    server.stop(grace=0)


def test_an_arm_that_did_not_obey_gives_no_figure(tmp_path: Path) -> None:
    """Its samples are written before its layers are counted."""
    built = report(tmp_path / "out")
    arm = next(arm for arm in ARMS if arm.retention == "1/4")
    failed = built.content["steps"][arm.name] | {"code": 1}
    del failed["evidence"]["pattern"]
    built.add(arm.name, failed)
    content = content_of(tmp_path / "out")
    assert served.value(content, arm.name, "prefill", 200_000) is None
    assert "at 1/4" not in served.line(content)
    served.table(content)
