"""The contract with the installed SGLang, checked on its source without running it."""

import ast
import importlib.metadata
from pathlib import Path

import pytest

from sglang_indexcache.errors import UnsupportedEngineError
from sglang_indexcache.serving import seams
from sglang_indexcache.serving.seams import SEAMS, Seam, problem_with

ROOT = Path(seams.__file__).parent


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.path)
def test_seam_is_in_place(seam: Seam) -> None:
    assert problem_with(seam) is None


def test_check_accepts_the_installed_version() -> None:
    seams.check()


def test_other_version_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.0")
    with pytest.raises(UnsupportedEngineError, match=r"0\.6\.0 is installed.*pip install"):
        seams.check()


@pytest.mark.parametrize(
    ("seam", "message"),
    [
        (Seam("sglang.srt.nowhere", "x", ""), "module sglang.srt.nowhere is gone"),
        (Seam("sglang.srt.server_args", "ServerArgs.nothing", ""), "nothing is gone"),
        (
            Seam("sglang.srt.server_args", "ServerArgs.add_cli_args", "", ("parser", "colour")),
            "no longer takes colour",
        ),
    ],
)
def test_moved_seam_is_noticed(seam: Seam, message: str) -> None:
    assert message in (problem_with(seam) or "")
    with pytest.raises(UnsupportedEngineError, match=message):
        seams.check((seam,))


def hooked_paths() -> set[str]:
    """Every string in the runtime package that names something in SGLang by its dotted path."""
    found = set()
    for path in ROOT.rglob("*.py"):
        if path.name == "seams.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = node.value.split(".")
                if parts[0] == "sglang" and len(parts) > 2 and all(p.isidentifier() for p in parts):
                    found.add(node.value)
    return found


def test_whatever_is_hooked_by_name_is_in_the_table() -> None:
    known = {seam.path for seam in SEAMS} | {seam.module for seam in SEAMS}
    classes = {seam.path.rsplit(".", 1)[0] for seam in SEAMS}
    assert hooked_paths() <= known | classes


# Every place where SGLang 0.5.23 says "dsa" or "nsa", by file and outermost definition, and why
# ``indexcache`` passes it: resolution turns the name into "dsa" at its first step, so whatever
# reads the resolved name treats it as DSA.
RESOLVED = "reads the resolved backend name"
TABLE = "a table that is looked up by the resolved name"
OTHER = "another thing called dsa: a KV pool, a transfer state"
DSA_SITES = {
    ("srt/arg_groups/choices.py", ""): "the choice list, to which ours is added",
    ("srt/arg_groups/kv_shard_hook.py", "validate_kv_shard_attention_backend"): RESOLVED,
    ("srt/arg_groups/model_overrides/deepseek_v2.py", "_deepseek_family_overrides"):
        "fills an unset backend; ours is set",
    ("srt/disaggregation/base/conn.py", "StateType"): OTHER,
    ("srt/disaggregation/mori/conn.py", "MoriKVManager"): OTHER,
    ("srt/layers/attention/attention_registry.py", "_create_nsa_compat"): "an old alias",
    ("srt/layers/attention/attention_registry.py", "create_dsa_backend"): "what ours replaces",
    ("srt/layers/cp/base.py", "CPAttentionBackendKind"): RESOLVED,
    ("srt/mem_cache/kv_cache_configurator.py", ""): OTHER,
    ("srt/mem_cache/kv_cache_configurator.py", "KVCacheConfigurator"): OTHER,
    ("srt/models/deepseek_common/attention_backend_handler.py", ""): TABLE,
    ("srt/models/deepseek_common/attention_forward_methods/forward_mla.py",
     "DeepseekMLAForwardMixin"): RESOLVED,
    ("srt/models/deepseek_common/attention_forward_methods/forward_mla_rocm.py",
     "DeepseekMLARocmForwardMixin"): RESOLVED,
    ("srt/models/deepseek_common/utils.py", ""): TABLE,
    ("srt/models/dots3_common/modeling.py", "Dots3AttentionMLA"):
        "an architecture that is refused",
    ("srt/models/sarvam_moe.py", ""): "an architecture without an indexer",
    ("srt/platforms/interface.py", ""): OTHER,
    ("srt/speculative/draft_utils.py", "DraftBackendFactory"):
        "draft models keep SGLang's own DSA backend",
}  # fmt: skip


def dsa_literals() -> set[tuple[str, str]]:
    """(file, outermost class or nothing) of every literal "dsa" or "nsa" in SGLang's code."""
    base = seams.sglang_folder()
    found = set()
    for path in base.rglob("*.py"):
        name = str(path.relative_to(base))
        if name.startswith(("multimodal_gen/", "test/")):
            continue
        text = path.read_text(encoding="utf-8")
        if '"dsa"' not in text and "'dsa'" not in text and '"nsa"' not in text:
            continue
        tree = ast.parse(text)
        docstrings = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for top in tree.body:
            for node in ast.walk(top):
                if (
                    isinstance(node, ast.Constant)
                    and node.value in ("dsa", "nsa")
                    and id(node) not in docstrings
                ):
                    found.add((name, getattr(top, "name", "")))
    return found


def test_every_special_treatment_of_dsa_is_known() -> None:
    found = dsa_literals()
    assert found - DSA_SITES.keys() == set(), "not covered: does the resolved name reach it?"
    assert DSA_SITES.keys() - found == set(), "gone from SGLang: drop it from the table"


def test_no_engine_code_reads_the_raw_backend_name() -> None:
    """Raw input keeps "indexcache"; whoever compared that with "dsa" would miss us."""
    base = seams.sglang_folder() / "srt"
    readers = []
    for path in base.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "server_args.attention_backend" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in ("attention_backend", "prefill_attention_backend")
                and isinstance(node.value, ast.Name)
                and node.value.id == "server_args"
            ):
                readers.append(f"{path.relative_to(base)}:{node.lineno}")
    assert readers == []
