"""Steps of the phases, and the way from a report to the page's tables, without a card."""

from __future__ import annotations

import ast
import json
import shutil
import sys
import tarfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks import readme
from benchmarks.card import pack, phases, record
from benchmarks.engine_kernels import engine_anchors, engine_default
from benchmarks.kernels.workloads import Workload, workloads
from benchmarks.records import RESULTS
from sglang_indexcache.kernels import build
from sglang_indexcache.lab.runs.provenance import output_lines
from tests.gpu import test_served
from tests.kernels.grid import cases, suite

COMMITTED = json.loads((RESULTS / "kernels" / "h100.json").read_text())


def step(name: str, code: str, seconds: float = 30) -> phases.Step:
    command = (sys.executable, "-c", code, "{json}", "{logs}")
    return phases.Step(name, seconds, command, needs=())


def run(report: phases.Report, folder: Path, *steps: phases.Step) -> dict[str, Any]:
    for current in steps:
        phases.run(current, report, folder, time.monotonic() + 60)
    content: dict[str, Any] = json.loads(report.path.read_text())
    return dict(content["steps"])


def test_every_way_in_which_a_step_ends_is_reported(tmp_path: Path) -> None:
    writes = "import sys; open(sys.argv[1], 'w').write('[1]'); print('last')"
    results = run(
        phases.Report(tmp_path / "out"),
        tmp_path,
        step("writes", writes),
        step("fails", "print('why'); raise SystemExit(3)"),
        step("hangs", "import time; time.sleep(60)", seconds=5),
        phases.Step("lacks its tool", 5, ("no-such-tool",), needs=()),
        phases.Step("lacks the card", 5, ("no-such-tool",)),
    )
    assert {name: result["code"] for name, result in results.items()} == {
        "writes": 0,
        "fails": 3,
        "hangs": phases.ENDED,
        "lacks its tool": phases.NO_TOOL,
        "lacks the card": phases.SKIPPED,
    }
    assert "needs an NVIDIA GPU" in results["lacks the card"]["said"]
    assert results["writes"]["evidence"] == [1]
    assert results["writes"]["said"] == ["last"]
    assert "why" in (tmp_path / "out" / "log.txt").read_text()


def test_what_a_step_that_hangs_had_found_and_its_servers_logs_come_back(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; os.mkdir(sys.argv[2]); open(sys.argv[1], 'w').write('[1]');"
        "open(sys.argv[2] + '/static.log', 'w').write('why it hangs'); time.sleep(60)"
    )
    report = phases.Report(tmp_path / "out")
    noted: list[Any] = []
    report.note = lambda name, evidence: noted.append(evidence)  # type: ignore[method-assign]
    results = run(report, tmp_path, step("hangs", code, seconds=6))
    assert results["hangs"]["evidence"] == [1]
    assert [1] in noted, "it is in the report before the step ends"
    assert "why it hangs" in (tmp_path / "out" / "servers.txt").read_text()


def test_a_call_that_is_killed_keeps_what_its_steps_had_found(tmp_path: Path) -> None:
    phases.Report(tmp_path).note("stock, all F", {"samples": [{"prefill": 1.5}]})
    again = phases.Report(tmp_path)  # of a next call: the first one wrote nothing more
    assert not again.has_passed("stock, all F")
    assert again.exit_code() == 1
    assert "BAD" in again.summary()
    again.add("stock, all F", {"code": phases.SKIPPED, "seconds": 0, "said": "no time was left"})
    step = json.loads(again.path.read_text())["steps"]["stock, all F"]
    assert step["evidence"] == {"samples": [{"prefill": 1.5}]}
    assert "then skipped: no time was left" in again.summary()
    assert record._summarize(step["said"]) == phases.CUT_OFF
    again.add("stock, all F", {"code": 0, "seconds": 9.0, "said": "measured"})
    assert again.has_passed("stock, all F")


def test_the_summary_fits_and_begins_with_what_failed(tmp_path: Path) -> None:
    report = phases.Report(tmp_path)
    for number, code in enumerate((0, phases.SKIPPED, 1)):
        report.add(str(number), {"code": code, "seconds": 1.0, "said": "x" * 9000})
    summary = report.summary()
    assert [line[:3] for line in summary.splitlines()[2:]] == ["BAD", "ok ", "ski"]
    for number in range(99):
        report.add(f"more {number}", {"code": 1, "seconds": 1.0, "said": "x" * 9000})
    assert len(report.summary()) <= 10_000


def test_a_second_call_runs_what_has_not_passed(tmp_path: Path) -> None:
    counts = "import pathlib; p = pathlib.Path('{}'); p.open('a').write('x')"
    good, bad = tmp_path / "good", tmp_path / "bad"
    steps = (
        step("good", counts.format(good)),
        step("bad", counts.format(bad) + "; raise SystemExit(1)"),
    )
    for _ in range(2):
        report = phases.Report(tmp_path / "out")
        run(report, tmp_path, *steps)
    assert (good.read_text(), bad.read_text()) == ("x", "xx")


def test_the_grid_s_words_are_counted() -> None:
    words = "  ties: rows differ\ncuda, topk: 3 passed, 1 failed\ncuda, mla: 2 passed, 0 failed\n"
    assert phases.cases(words) == {"passed": 5, "failed": 1, "wrong": ["ties: rows differ"]}
    assert phases.cases("error: nothing was checked")["wrong"] == ["error: nothing was checked"]


def test_what_a_step_says_is_its_last_error_or_line() -> None:
    assert phases.last("loading\nRuntimeError: no nvcc\nstderr:\n") == ["RuntimeError: no nvcc"]
    assert phases.last("one\ntwo\n\n") == ["two"]


def test_every_phase_has_steps_of_its_own() -> None:
    names = [
        current.name
        for phase in phases.PHASES
        for stage in phases.stages(phase)
        for current in stage
    ]
    assert len(set(names)) == len(names)
    (kernels, *_), (servers, *_) = phases.stages("served")
    assert kernels.name.startswith("compile SGLang's"), "before a server wants them"
    assert servers.name == "served eager"


def test_every_test_of_servers_has_a_step() -> None:
    steps = [step for stage in phases.stages("served") for step in stage]
    selectors = {step.command[-1].split(" and ")[0] for step in steps if "-k" in step.command}
    tests = [name for name in vars(test_served) if name.startswith("test_")]
    assert len(tests) == len(selectors)
    for name in tests:
        assert sum(selector in name for selector in selectors) == 1, name


def test_sglang_still_compiles_what_is_compiled_ahead() -> None:
    """Read in its source: importing it wants a card."""
    engine = find_spec("sglang")
    if engine is None or engine.origin is None:
        pytest.skip("needs SGLang")
    for line in phases.ENGINE_KERNELS.values():
        module, function, *arguments = line.split(" ", 2)
        path = Path(engine.origin).parent.joinpath("kernels", "ops", *module.split("."))
        tree = ast.parse(path.with_suffix(".py").read_text())
        (definition,) = (
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name == function
        )
        count = len(arguments[0].split(", ")) if arguments else 0
        assert len(definition.args.args) == count, line


def test_kernels_of_other_sources_do_not_travel(tmp_path: Path) -> None:
    """There they would be built again, by an nvcc that makes wrong code."""
    pytest.importorskip("tvm_ffi")
    built = tmp_path / "kernels.tar.gz"
    with pytest.raises(SystemExit, match=r"is missing: run \.ci/archive"):
        pack.check_kernels(built)
    for stems in ([build.stem_of(folder) for folder in build.FOLDERS], ["topk-0-cuda"]):
        with tarfile.open(built, "w:gz") as packed:
            for stem in stems:
                packed.addfile(tarfile.TarInfo(f"{stem}13.1.80/build.log"))
        if len(stems) > 1:
            pack.check_kernels(built)
    with pytest.raises(SystemExit, match="other sources"):
        pack.check_kernels(built)


def test_the_checkout_leaves_room_for_the_packages_and_has_what_servers_are_asked_for() -> None:
    assert pack.tracked_bytes() + pack.PACKAGES_BYTES < pack.TRAVEL_BYTES
    assert {path.name for path in (pack.ROOT / "patterns").glob("glm-4.7-flash-dsa*")} == {
        f"glm-4.7-flash-dsa-1of{every}.yaml" for every in (2, 4, 8)
    }, "servers are asked for these by their retention"


def test_code_that_was_changed_has_another_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "csrc").mkdir()
    source = tmp_path / "csrc" / "topk.cu"
    source.write_text("a")
    monkeypatch.setattr(pack, "ROOT", tmp_path)
    before = pack.sources()
    (tmp_path / "csrc" / "notes.md").write_text("no code")
    assert pack.sources() == before
    source.write_text("b")
    assert pack.sources() != before


def test_what_a_card_passed_with_these_kernels_is_not_run_again(tmp_path: Path) -> None:
    (run, *_) = COMMITTED["runs"]
    machine = {"name": COMMITTED["machine"]["name"], "kernels": run["kernels"]}
    assert (
        phases.passed_before("grid topk", machine) == "passed on 2026-11-26 with the same kernels"
    )
    other = {**machine, "kernels": ["topk-another-cuda", *run["kernels"][1:]]}
    assert phases.passed_before("grid topk", other) is None
    assert phases.passed_before("grid sparse_mla", other)
    assert phases.passed_before("grid topk", {**machine, "name": "another card"}) is None
    assert phases.passed_before("racecheck sparse_mla", machine) is None, "it had not passed"
    assert phases.passed_before("served eager", machine) is None
    assert phases.passed_before("racecheck 8-heads-bf16-k64-rows1", machine) is None, "not run"
    for known in (
        step for name in phases.PHASES for stage in phases.stages(name) for step in stage
    ):
        phases.passed_before(known.name, machine)
    report = phases.Report(tmp_path / "out")
    report.content["machine"] |= machine
    phases.run(step("grid topk", "raise SystemExit(1)"), report, tmp_path, time.monotonic() + 60)
    assert report.content["steps"]["grid topk"]["code"] == phases.SKIPPED
    assert "same kernels" in report.summary()


def test_commits_of_the_record_are_objects_of_this_repository() -> None:
    for run in COMMITTED["runs"]:
        assert run["kernels"], "what a run's sources were"
        if "commit" in run:
            command = ["git", "-C", str(RESULTS), "cat-file", "-t", run["commit"]]
            assert output_lines(command) == ["commit"], run["commit"]


# -- from a report to tables --------------------------------------------------------------------

STEPS: dict[str, tuple[int, Any]] = {
    "grid topk": (0, {"passed": 3, "failed": 0}),
    "served eager": (0, ["1 passed, 4 deselected in 9.00s"]),
    "served live": (0, ["2 skipped in 9.00s"]),
    "start": (phases.SKIPPED, "needs SGLang"),
    "ncu select_kernel": (0, ["gpu__time_duration.sum ms 8.5"]),
    "ncu topk_kernel": (1, ["==ERROR== no permission"]),
}
DECODE = Workload("mla_decode", 1, 122_880, 8, fp8=True)


def took(median: float, least: float | None = None) -> dict[str, float]:
    return {"median_us": median, "min_us": least or median, "max_us": 40.0, "repetitions": 20}


def report(
    folder: Path, timed: dict[Workload, dict[str, dict[str, float]]] | None = None, **machine: Any
) -> Path:
    """Write a folder as a call of the phases leaves it."""
    built = phases.Report(folder)
    facts = {"date": "2026-01-01", "commit": "1234567", "kernels": ["topk-0123-cuda"]}
    built.content["machine"] = COMMITTED["machine"] | facts | machine
    for name, (code, output) in STEPS.items():
        outcome = {"outcome": "passed", "evidence": {"prompts compared": 2, "left out": 1}}
        evidence = {"tests": {"tests/gpu/test_served.py::test_eager": outcome}}
        more = {"evidence": evidence} if name == "served eager" else {}
        built.add(name, {"code": code, "seconds": 2.0, "said": output} | more)
    timed = timed or {DECODE: {"flash_mla": took(30.0, 10.0), "cuda": took(10.0, 9.0)}}
    rest: dict[str, Any] = {"missing": {}, "wrong": [], "clocks": []}
    speed = {str(work): {"times": times, **rest} for work, times in timed.items()}
    (folder / "speed.json").write_text(json.dumps(speed))
    return folder


def everywhere(ours: float) -> dict[Workload, dict[str, dict[str, float]]]:
    """Make times of SGLang's default, its fastest and ours, for every workload."""
    return {
        work: {engine_default(work): took(30.0), name: took(20.0), "cuda": took(ours)}
        for work in workloads()
        for name in list(engine_anchors(work))[-1:]
    }


def test_a_report_goes_all_the_way_to_the_tables(tmp_path: Path) -> None:
    quick = {DECODE: {"flash_mla": took(30.0), "cuda": took(10.0, 9.0)}}
    quiet = record.make_record([report(tmp_path / "a", quick)])
    assert "commit" not in quiet["runs"][0], "it is no object of this repository"
    assert quiet["runs"][0]["kernels"] == ["topk-0123-cuda"]
    assert quiet["counters"] == {"select_kernel": {"gpu__time_duration.sum": "8.5 ms"}}
    assert "| decode | FP8 | 8 | 1 | 30 | 10 | 3.00x |" in record.attention_table(quiet)
    assert "3 cases right, 0 wrong" in record.exact_table(quiet)
    assert "start" not in record.exact_table(quiet), "what was skipped was not found out"
    assert "8.5 ms" in record.counters_table(quiet)
    assert record.composed_sum(quiet) == "not measured\n"
    assert "| eager: passed, prompts compared 2, left out 1 |" in record.exact_table(quiet)


def test_a_made_up_report_goes_to_the_pages_and_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results"
    shutil.copytree(RESULTS / "kernels", results / "kernels")
    shutil.copy(RESULTS / "expect.json", results)
    written = results / record.RECORD
    pages = [page for page in readme.PAGES if "generated:card-" in (readme.ROOT / page).read_text()]
    before = {page: (readme.ROOT / page).read_text() for page in pages}
    assert Path("README.md") in pages
    folder = report(tmp_path / "out", everywhere(10.0))
    line = ["record", str(folder), "--fresh", "--output", str(written)]
    monkeypatch.setattr(sys, "argv", line)
    record.main()
    filled = {page: readme.fill(text, results) for page, text in before.items()}
    assert "3 of 3 cases right" in filled[Path("README.md")]
    assert "attention in decode, 8 heads, FP8, 2.00x" in filled[Path("README.md")]
    assert "repeats its own: eager 2 of 3 prompts.<!--" in filled[Path("README.md")]
    kernels = filled[Path("benchmarks/results/kernels/README.md")]
    assert "| attention in decode | 8 | bfloat16 | 8 of 8 | 2.00x |" in kernels
    written.unlink()
    gone = {page: readme.fill(text, results) for page, text in filled.items()}
    assert "<!-- generated:card-line -->not measured<!--" in gone[Path("README.md")]
    shutil.copy(RESULTS / record.RECORD, written)
    assert {page: readme.fill(text, results) for page, text in gone.items()} == before


def test_a_report_is_added_to_the_record_and_its_last_runs_count(tmp_path: Path) -> None:
    kit_alone = {"sglang": None, "deep_gemm": None, "version": "another"}
    together = record.make_record([report(tmp_path / "a", **kit_alone)], before=COMMITTED)
    assert together["machine"]["sglang"] == COMMITTED["machine"]["sglang"]
    assert len(together["runs"]) == len(COMMITTED["runs"]) + 1
    assert together["speed"][-1]["run"] == len(COMMITTED["runs"])
    assert "| served eager | passed |" in record.exact_table(together)
    assert record.exact_table(together).count("served eager") == 1


def test_launches_that_came_too_late_are_marked(tmp_path: Path) -> None:
    """Whatever made the host late: it once did so while nothing else was known to run."""
    late = record.make_record([report(tmp_path / "a")])
    assert "| decode | FP8 | 8 | 1 | 10\\* | 10 | 1.00x |" in record.attention_table(late)


def test_calls_on_different_machines_make_no_record(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="machines that differ in torch"):
        record.make_record([report(tmp_path / "a", torch="2.12")], before=COMMITTED)


def test_a_gain_is_over_the_fastest_and_none_without_sglangs_default(tmp_path: Path) -> None:
    def gains_of(name: str, timed: dict[Workload, dict[str, dict[str, float]]]) -> Any:
        return record.gains(record.make_record([report(tmp_path / name, timed)]))

    every = gains_of("all", everywhere(10.0))
    assert {ratio for ratios in every.values() for ratio in ratios} == {2.0}
    slow = everywhere(10.0)
    slow[Workload("select_prefill", 256, 204_800, 32)]["cuda"] = took(25.0)
    assert sorted(gains_of("slow", slow)["select_prefill", 32, False])[:2] == [0.8, 2.0]
    lacking, decode = everywhere(10.0), Workload("mla_decode", 8, 122_880, 8)
    del lacking[decode]["fa3"]
    kind = ("mla_decode", 8, False)
    assert len(gains_of("the default did not run", lacking)[kind]) == len(every[kind]) - 1


def test_the_committed_record_has_workloads_that_are_known_and_none_was_wrong() -> None:
    timed = {row["workload"] for row in COMMITTED["speed"]}
    gone = {
        name for name in timed if name.startswith("topk-")
    }  # beside a call that no server makes
    assert timed - gone <= {str(work) for work in workloads()}
    assert not [row["workload"] for row in COMMITTED["speed"] if row["wrong"]]
    grids = [
        result["said"]
        for name, result in COMMITTED["runs"][0]["steps"].items()
        if name.startswith("grid")
    ]
    assert sum(grid["passed"] for grid in grids) == 102
    assert sum(grid["failed"] for grid in grids) == 0


def test_what_the_pages_say_of_the_record_is_in_it() -> None:
    page = (RESULTS / "kernels" / "h100.md").read_text()
    metrics = {name: metric for metric, name in record.COUNTER_NAMES.items()}
    for kernel, times in (("select_kernel", 1.08), ("mqa_logits", 1.06)):
        counters = COMMITTED["counters"][kernel]
        busy = [
            float(counters[metrics[name]].split()[0])
            for name in ("issue slots, %", "tensor cores, %")
        ]
        assert round(busy[0] / busy[1], 2) == times
        assert f"{times} times" in page

    by_name = {row["workload"]: row["times"] for row in COMMITTED["speed"]}
    whole = by_name["select_decode-rows1-context204800-heads32"]["deep_gemm + sglang v2"]
    alone = by_name["topk-rows1-context204800-heads0"]["sglang v2"]
    assert whole["median_us"] < alone["median_us"], "beside a top-k that no decode calls"

    late = [row for row in record.speed_of(COMMITTED) if row["workload"].startswith("select")]
    assert any(record.microseconds(row, "cuda")[1] for row in late if "cuda" in row["times"])
    lists = {work.overlap for work, _ in record.timed(COMMITTED, "mla_prefill")}
    assert lists == {70}, "so auto takes attention in prefill only where it is told of that"


def test_the_phases_check_every_group_of_the_grid() -> None:
    assert tuple(suite.GROUPS) == phases.GROUPS
    assert tuple(map(str, cases.CLUSTERS)) == phases.CLUSTERS
