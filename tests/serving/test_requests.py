"""A request's pattern, as the schedulers and the HTTP process decide it."""

from __future__ import annotations

import io
import json
from array import array
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import Findings, IndexCacheError, SettingsError
from sglang_indexcache.lab.demo import shipped_checkpoint
from sglang_indexcache.library.resolve import LIBRARY_VARIABLE, Library
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving import process, requests
from sglang_indexcache.serving.options import collect
from sglang_indexcache.serving.plan import CONFIG_KEY, Plan
from sglang_indexcache.serving.resolve import make_plan
from tests.library.entries import GOOD, write
from tests.serving.plans import plan


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch, own_hooks: None) -> None:
    """Leave SGLang as it was, and no request behind."""
    from sglang.srt.managers.scheduler_components import output_streamer

    streamer = output_streamer.SchedulerOutputStreamer
    for owner, name in (
        (Req, "__init__"),
        (ForwardBatch, "init_new"),
        (streamer, "is_request_level_customized_info_key"),
        (Scheduler, "_release_aborted_request"),
    ):
        monkeypatch.setattr(owner, name, owner.__dict__[name])
    bag = SimpleNamespace(pp_size=1, tp_rank=0)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: bag)
    monkeypatch.setattr("sglang.srt.managers.schedule_batch.get_parallel", lambda: bag)
    requests._admitted.clear()
    requests._remembered.cache_clear()
    requests._library.cache_clear()


def serve(text: str = "FFFF", mode: str = "live", **fields: Any) -> process.ServingProcess:
    """Make this process a worker whose default is ``text``."""
    served_plan = plan(text, mode=mode, **fields)
    requests.install(served_plan)
    return process.activate(served_plan)


def admit(name: Any = None, length: int = 8, **fields: Any) -> Req:
    custom = None if name is None else {requests.NAME: name}
    return Req("1", "", array("q", range(length)), SamplingParams(custom_params=custom), **fields)


def stored_under(*args: Any, **fields: Any) -> Any:
    """Return the keys under which a request's pages go to HiCache's storage."""
    request = admit(*args, **fields)
    return get_storage_hash_str(RadixKey(request.origin_input_ids, request.extra_key), page_size=4)


# -- which pattern -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["FFF", "nobody", "ffff", "", 1, ["FFFF"], "x.yaml", "F" * 10_000])
def test_what_is_no_pattern_ends_the_request_alone(name: Any) -> None:
    """It reached the scheduler by a way that does not pass our check in the HTTP process."""
    serving = serve()
    with pytest.raises(IndexCacheError) as refusal:
        requests.resolve(serving.plan, name)
    request = admit(name)
    assert request.to_finish.message == str(refusal.value)
    assert request.to_finish.status_code == 400
    assert request.indexcache_pattern == Pattern("FFFF")
    assert len(str(refusal.value)) < 500
    assert admit().to_finish is None


GOOD_NAMES = 300
FOUR = Checkpoint("GlmMoeDsaForCausalLM", (0, 1, 2, 3), Pattern("FFFF"), {})


def named(folder: Path, count: int) -> list[str]:
    """Write so many files of patterns for four layers; return their names."""
    names = [f"mine-{number}" for number in range(count)]
    for name in names:
        write(folder, {**GOOD, "name": name}, f"{name}.yaml")
    return names


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the files that are opened, and the folders that are listed."""
    noted: list[str] = []

    def noting(kind: str, original: Any) -> Any:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            noted.append(f"{kind} {path}")
            return original(path, *args, **kwargs)

        return call

    monkeypatch.setattr(io, "open", noting("open", io.open))
    for name in ("iterdir", "glob", "is_dir"):
        monkeypatch.setattr(Path, name, noting(name, getattr(Path, name)))
    return noted


def test_the_library_is_read_once_and_no_request_reads_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[str]
) -> None:
    """Unknown names, and more good ones than are remembered, as one client can send them."""
    names = named(tmp_path, GOOD_NAMES)
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path))
    few = lru_cache(maxsize=64)(requests._remembered.__wrapped__)
    monkeypatch.setattr(requests, "_remembered", few)
    serving = serve(library=Library.default().digest)
    assert any(f"open {tmp_path}" in read for read in reads)
    reads.clear()
    for _ in range(2):
        for number in range(100):
            with pytest.raises(IndexCacheError, match="no pattern is called 'zz"):
                requests.resolve(serving.plan, f"zz{number}")
        for name in names:
            assert requests.resolve(serving.plan, name) == Pattern("FSFS")
    assert admit("nobody").to_finish is not None
    assert reads == []


def test_refusals_are_remembered_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a client that repeats itself has every name compared with all names again."""
    serving, asked = serve(), []
    resolve = Library.resolve

    def asking(self: Library, value: str, *args: Any, **kwargs: Any) -> Any:
        asked.append(value)
        return resolve(self, value, *args, **kwargs)

    monkeypatch.setattr(Library, "resolve", asking)
    for _ in range(50):
        with pytest.raises(IndexCacheError) as refusal:
            requests.resolve(serving.plan, "nobody")
    assert asked == ["nobody"]
    frames, trace = 0, refusal.value.__traceback__
    while trace is not None:
        frames, trace = frames + 1, trace.tb_next
    assert frames < 10  # those of fifty refusals are not kept
    assert requests._remembered.cache_info().maxsize == requests._REMEMBERED


def test_files_that_change_while_a_server_starts_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named(tmp_path, 1)
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path))
    resolved = plan("FFFF", mode="live", library=Library.default().digest)
    requests.install(resolved)
    requests._library.cache_clear()  # as in another process
    write(tmp_path, {**GOOD, "name": "mine-0", "pattern": "FFSS"}, "mine-0.yaml")
    with pytest.raises(SettingsError, match=r"changed while this server started.* Start it again"):
        requests.install(resolved)


def test_files_that_change_while_a_server_runs_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named(tmp_path, 2)
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path))
    serving = serve(library=Library.default().digest)
    write(tmp_path, {**GOOD, "name": "mine-0", "pattern": "FFSS"}, "mine-0.yaml")
    (tmp_path / "mine-1.yaml").unlink()
    for name in ("mine-0", "mine-1"):
        assert requests.resolve(serving.plan, name) == Pattern("FSFS")


def test_plans_know_their_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So ranks whose files differ disagree at the start, and not at the first request."""
    terms = set()
    for pattern in ("FSFS", "FFSS"):
        write(tmp_path, {**GOOD, "pattern": pattern})
        monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path))
        made = make_plan({}, FOUR, {}, "", Findings())
        assert made.library == Library.default().digest
        assert f"library {made.library}" in made.terms
        assert Plan.from_json(json.loads(json.dumps(made.hf_overrides()[CONFIG_KEY]))) == made
        terms.add(made.terms)
    assert len(terms) == 2


def test_a_half_written_file_is_told_at_the_start_and_refuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    named(tmp_path, 1)
    half = write(tmp_path, "pattern: [FSFS", "half.yaml")
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path))
    serving = process.activate(make_plan({}, FOUR, {}, "", Findings()))
    assert f"left out of the library: {half} is not valid YAML" in caplog.text
    live_plan = replace(serving.plan, mode="live")
    for name, text in {"mine-0": "FSFS", "FSSS": "FSSS", "full": "FFFF"}.items():
        assert requests.resolve(live_plan, name) == Pattern(text)


ODD = [
    "half",
    "half.yaml",
    "./half.yaml",
    "mine",
    "1/4",
    "1/3",
    "zz",
    "FXSF",
    "uniform:1/9",
    "",
    "~",
]


@pytest.mark.parametrize("name", ODD)
def test_no_refusal_holds_a_path_of_the_server(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "pattern: [FSFS", "half.yaml")
    write(tmp_path, {**GOOD, "full_layers": 3})
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path))
    serving = serve(library=Library.default().digest)
    with pytest.raises(IndexCacheError) as refusal:
        requests.resolve(serving.plan, name)
    folders = [str(folder) for folder in Library.default().folders]
    assert not [folder for folder in folders if folder in str(refusal.value)]


def test_blanks_around_a_name_are_none_of_it() -> None:
    """YAML and shells leave some."""
    serving = serve()
    assert requests.resolve(serving.plan, " uniform:1/4 ") == Pattern("FSSS")
    assert admit("\tFSFS\n").indexcache_pattern == Pattern("FSFS")
    with pytest.raises(IndexCacheError, match="no pattern at retention 1/4"):
        requests.resolve(serving.plan, " 1/4 ")


def test_a_ratio_is_looked_up_for_the_model_that_is_served() -> None:
    """It is as on the command line, also in a worker, which has the plan from the config."""
    checkpoint = Checkpoint.read(shipped_checkpoint())
    choices = collect({"indexcache_mode": "live"})
    resolved_plan = make_plan(choices, checkpoint, {}, "", Findings())
    worker = Plan.from_json(json.loads(json.dumps(resolved_plan.hf_overrides()[CONFIG_KEY])))
    assert worker == resolved_plan
    expected = Library.default().resolve("1/2", checkpoint).pattern
    assert requests.resolve(worker, "1/2") == expected
    assert expected != Pattern.uniform(12, 2)


def test_the_sentence_is_the_command_lines() -> None:
    live_plan = plan("FFFF", mode="live")
    for name in ("FFF", "nobody", "ffff", "SFFF"):
        with pytest.raises(IndexCacheError) as by_command:
            Library.default().resolve(name, live_plan.checkpoint())
        with pytest.raises(IndexCacheError) as by_server:
            requests.resolve(live_plan, name)
        assert str(by_server.value) == str(by_command.value)


def test_stages_want_full_layers_at_their_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    bag = SimpleNamespace(pp_size=2, tp_rank=0)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: bag)
    serve()
    assert admit("FSFS").to_finish is None
    assert "stages start at layer 2" in admit("FSSS").to_finish.message


# -- what hangs on it --------------------------------------------------------------------------


@pytest.mark.parametrize("extra_key", [None, "a user's"])
@pytest.mark.parametrize("mode", ["static", "live"])
def test_patterns_do_not_find_each_others_pages(mode: str, extra_key: str | None) -> None:
    namespaces = [stored_under(extra_key=extra_key)]  # stock SGLang
    for text in ("FSFS", "FFFS"):
        if mode == "static":
            serve(text, mode)
            namespaces.append(stored_under(extra_key=extra_key))
        else:
            serve("FFFF", mode)
            namespaces.append(stored_under(text, extra_key=extra_key))
            assert stored_under("full", extra_key=extra_key) not in namespaces
    for page in range(2):
        assert len({pages[page] for pages in namespaces}) == 3


def test_a_static_and_a_live_server_store_other_index_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    serve("FSFS", "static")
    static = stored_under()
    serve("FSFS", "live")
    assert stored_under() != static


def test_users_keys_and_adapters_stay_apart() -> None:
    serve("FSFS", "static")
    keys = [
        stored_under(),
        stored_under(extra_key="a"),
        stored_under(extra_key="b"),
        stored_under(extra_key="a", lora_id="adapter"),
    ]
    assert len({pages[0] for pages in keys}) == 4


def test_the_checkpoints_own_sharing_shares_with_stock() -> None:
    stock = stored_under()
    serve("FFFF", "static")
    assert stored_under() == stock


def test_a_request_that_comes_back_keeps_its_key() -> None:
    once = requests.within("indexcache-1", "mine")
    assert requests.within("indexcache-1", once) == once
    alone = requests.within("indexcache-1", None)
    assert requests.within("indexcache-1", alone) == alone
    assert requests.within("indexcache-2", once) != once


# -- what a request says -----------------------------------------------------------------------


def named_in(custom: Any) -> Any:
    return requests.named_by(SimpleNamespace(custom_params=custom))


@pytest.mark.parametrize(
    "key",
    ["indexcache_patern", "INDEXCACHE_PATTERN", "indexcache-pattern", "index_cache_pattern",
     "IndexCache", "indexcache_pattern=full", " indexcache_pattern"],
)  # fmt: skip
def test_a_key_that_means_us_and_is_not_ours_is_refused(key: str) -> None:
    with pytest.raises(SettingsError, match="pattern is named in indexcache_pattern"):
        named_in({key: "FFFF", "indexcache_pattern": "FFFF"})
    serve()
    request = Req("1", "", array("q", [1]), SamplingParams(custom_params={key: "FFFF"}))
    assert request.to_finish.status_code == 400


@pytest.mark.parametrize("custom", ["FFFF", ["FFFF"], 1, False])
def test_custom_params_are_a_mapping(custom: Any) -> None:
    with pytest.raises(SettingsError, match="custom_params is a"):
        named_in(custom)


@pytest.mark.parametrize(
    "custom", [None, {}, {"thinking_budget": 3, "pattern": "FFFF", "index": 1, "cache_pattern": 2}]
)
def test_others_keys_are_theirs(custom: Any) -> None:
    assert named_in(custom) is None
