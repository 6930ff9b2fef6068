"""Any engine by chat completions: right answers, and everything that can go wrong in between."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_indexcache.errors import QualityError, ServerError
from sglang_indexcache.evaluate import run
from sglang_indexcache.evaluate.arms import Separate, make_arms
from sglang_indexcache.evaluate.chat import ChatEndpoint, check_only_chat, is_chat, make_chat_ask
from sglang_indexcache.evaluate.evaluation import Evaluation, Mode
from sglang_indexcache.evaluate.journal import load
from sglang_indexcache.evaluate.plan import Material, Plan, cost, tails
from sglang_indexcache.evaluate.report import write_report
from sglang_indexcache.evaluate.shelf import Bounds, fill_shelf
from sglang_indexcache.evaluate.verdict import Kind
from sglang_indexcache.stats.pairs import paired
from tests.evaluate.evaluate import ARMS, PLAN, evaluate, material_of
from tests.evaluate.fake_server import HAYSTACK, TOPK, Fake, Words, serving
from tests.evaluate.tasks.published import mrcr_row, write


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PAUSES", (0.0, 0.0, 0.0))


def told(plan: Plan, material: Material) -> dict[str, str]:
    """The right answers by the last message."""
    made = [material.make(planned) for planned in plan.planned]
    return {
        material.conversation(context, question)[-1]["content"]: question.answer_text
        for context in made
        for question in context.questions
    }


def chatted(
    folder: Path,
    plan: Plan = PLAN,
    material: Material | None = None,
    fault: str = "",
    after: int = 0,
    **changes: Any,
) -> Evaluation:
    """An evaluation on an engine for each arm, the last of which has a fault."""
    material = material or material_of(plan)
    with ExitStack() as stack:
        urls = {}
        for arm in ARMS:
            fake = Fake(pattern=arm.pattern, told=told(plan, material), **changes)
            if arm is ARMS[-1]:
                fake.fault, fake.after = fault, after
            urls[arm.name] = stack.enter_context(serving(fake)) + "/v1"
        ask = make_chat_ask(material, TOPK, 50)
        return evaluate(folder, urls, plan, ARMS, Mode.GENERATE, material, ask=ask, tell=print)


def test_a_whole_evaluation_of_any_engine(tmp_path: Path) -> None:
    found = chatted(tmp_path)
    assert found.finished
    assert not found.pattern_verified
    assert {kind.kind for _, kind in found.verdicts().values()} <= {Kind.LOSS, Kind.UNDECIDED}
    rows = found.outcomes()
    assert paired(rows, "full", "full", repeat=1).flips.share == 0
    long = [row for row in rows if row.length > TOPK]
    assert paired(long, "few", "full").flips.lost > paired(long, "few", "full").flips.won
    control = [row for row in rows if row.length <= TOPK]
    assert not paired(control, "few", "full").values.any()
    assert all(row.reply is not None and row.nll is None for row in found.answers)
    assert load(tmp_path) == found


def test_the_cost_at_most_is_that_of_whole_prompts(tmp_path: Path) -> None:
    plan = replace(PLAN, lengths=(512,), margin=0.02)
    found = chatted(tmp_path, plan)
    parts = plan, len(ARMS), tails(plan, material_of(plan))
    whole = cost(*parts, chat=True).total
    assert cost(*parts).total < found.tokens <= whole < 1.5 * found.tokens


def test_the_report_says_that_no_pattern_was_verified(tmp_path: Path) -> None:
    found = chatted(tmp_path)
    said = write_report(found, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert all("Pattern not verified" in line for line in said.split("\n"))
    assert '"pattern_verified": false' in (tmp_path / "eval.json").read_text()
    assert "<td>few (pattern not verified)</td>" in page
    assert "FSSSSSSSSSSS</code> (pattern not verified)" in page
    assert "By the sources&#39; own metrics" in page or "By the sources' own metrics" in page


def test_a_file_is_asked_as_it_is_published(tmp_path: Path) -> None:
    path = write(tmp_path / "mrcr.parquet", [mrcr_row(n) for n in range(12)])
    bounds = Bounds((512,), 4096, TOPK, 12, 1, 0, True)
    shelf = fill_shelf({"mrcr": path}, Words(), bounds)
    plan = Plan((), (512,), 12, 4, TOPK, margin=0.5, looks=1, taken=shelf.taken)
    material = Material(Words(), HAYSTACK, 4, shelf.items)
    found = chatted(tmp_path / "out", plan, material, level=1.0)
    rows = [row for row in found.answers if row.task == "mrcr"]
    assert sum(row.arm == "full" for row in rows) == 12 + 3
    for row in rows:
        assert row.score == float(row.right or 0)
        if row.arm == "full":
            assert row.right
            assert row.reply == mrcr_row(int(row.question.removeprefix("row")) - 1)["answer"]


REFUSED = {
    "truncates": r"read 100 tokens in a prompt .* that has 1\d\d .*: it cuts long prompts, or has",
    "another tokenizer": r"read \d\d\d tokens .*: it has another tokenizer or chat template",
    "no usage": "does not say how many tokens a prompt has",
    "garbage": "something that is no chat completion.*another program",
    "half an answer": "stopped answering|half an answer",
    "stops": "stopped answering.*start the same command again",
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_goes_wrong_is_refused_by_name(tmp_path: Path, fault: str) -> None:
    after = 12 if fault in ("stops", "truncates") else 0  # in the middle, or from the start
    with pytest.raises(QualityError, match=REFUSED[fault]):
        chatted(tmp_path, fault=fault, after=after)
    if after:
        assert len(load(tmp_path).answers) > 0
        assert chatted(tmp_path).finished  # goes on where it stopped


def test_replies_that_are_cut_are_refused(tmp_path: Path) -> None:
    with pytest.raises(QualityError, match=r"ended by their length, more than 5%.*--reply-tokens"):
        chatted(tmp_path, fault="rambles")


def test_one_engine_cannot_be_every_arm(tmp_path: Path) -> None:
    said = "cannot be told to change it. Start a server for each arm and give each as --url NAME="
    with serving(Fake()) as url, pytest.raises(QualityError, match=said):
        evaluate(tmp_path, url + "/v1")


def test_two_arms_at_one_address_are_refused(tmp_path: Path) -> None:
    """They would agree in everything, which would be no loss."""
    with serving(Fake()) as url, serving(Fake()) as other, serving(Fake()) as third:
        urls = dict.fromkeys([arm.name for arm in ARMS], f"{url}/v1") | {"worst": f"{other}/v1"}
        with pytest.raises(QualityError, match=rf"full and half are both to be asked at {url}/v1,"):
            evaluate(tmp_path, urls)
        urls |= {"full": f"{third}/v1"}
        with pytest.raises(QualityError, match="half and few are both to be asked at"):
            evaluate(tmp_path, urls)
    fake = Fake(models=("a", "b", "c", "d"))  # at one address, but not one model
    with serving(fake) as url:
        named = zip(ARMS, fake.models, strict=True)
        clients = {arm.name: ChatEndpoint(f"{url}/v1#{model}") for arm, model in named}
        assert isinstance(make_arms(ARMS, clients), Separate)


def test_another_engine_at_its_bare_address_is_told_how_it_is_asked(tmp_path: Path) -> None:
    said = "is no SGLang server: it has no /server_info.*by chat completions: give its address up"
    with serving(Fake(fault="stranger")) as url, pytest.raises(QualityError, match=said):
        evaluate(tmp_path, dict.fromkeys([arm.name for arm in ARMS], url))


def test_a_control_ends_before_a_pattern_could_matter(tmp_path: Path) -> None:
    fakes = []
    material = material_of(PLAN)
    with ExitStack() as stack:
        urls = {}
        for arm in ARMS:
            fakes.append(Fake(pattern=arm.pattern, told=told(PLAN, material)))
            urls[arm.name] = stack.enter_context(serving(fakes[-1])) + "/v1"
        ask = make_chat_ask(material, TOPK, 500)
        evaluate(tmp_path, urls, PLAN, ARMS, Mode.GENERATE, material, ask=ask, tell=print)
    for body in fakes[0].asked:
        own, _ = material.count(body["messages"])
        assert body["temperature"] == 0
        assert body["max_tokens"] + own <= TOPK or own > TOPK or body["max_tokens"] == 1


def test_the_model_is_named_where_there_are_several() -> None:
    with serving(Fake(models=("a", "b"))) as url:
        with pytest.raises(QualityError, match=r"has the models a, b: say which, as .*/v1#MODEL"):
            ChatEndpoint(f"{url}/v1")
        with pytest.raises(QualityError, match="has the models a, b: say which"):
            ChatEndpoint(f"{url}/v1#c")
        endpoint = ChatEndpoint(f"{url}/v1/#b")
        assert endpoint.model == "b"
        assert endpoint.is_ready()
        assert endpoint.server_info() == {
            "version": "chat completions of fake",
            "max_req_input_len": 8192,
        }
    with pytest.raises(ServerError, match="cannot reach"):
        ChatEndpoint(f"{url}/v1")
    with serving(Fake()) as url, pytest.raises(QualityError, match="lists no models"):
        ChatEndpoint(url)


def test_addresses_tell_how_they_are_asked() -> None:
    assert is_chat("http://a:1/v1")
    assert is_chat("https://a/proxy/v1/#m")
    assert not is_chat("http://a:1")
    with serving(Fake()) as url:
        chat = ChatEndpoint(f"{url}/v1")
        assert check_only_chat({"a": chat, "b": chat})
        with pytest.raises(
            QualityError, match=r"^a is asked by chat completions .* in the same wa"
        ):
            check_only_chat({"a": chat, "b": super(ChatEndpoint, chat)})  # type: ignore[dict-item]
