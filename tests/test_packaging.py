"""Contents of the wheel, wherever it is built, and of its extras."""

from __future__ import annotations

import json
import re
import tomllib
from os.path import normpath
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version
from typer.testing import CliRunner

from sglang_indexcache import __version__
from sglang_indexcache.cli import app
from sglang_indexcache.cli.common import EXTRAS
from sglang_indexcache.serving.engine_version import SUPPORTED_VERSION

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WHEEL = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
HOOK = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]["path"]
PARTS = [
    *("pyproject.toml", "README.md", HOOK, "docs"),
    *PROJECT["project"]["license-files"],
    *WHEEL["packages"],
    *(path.split("/")[0] for path in WHEEL["force-include"]),
]
IMAGES = sorted((ROOT / "docker").glob("Dockerfile*"))
INSTRUCTIONS = {
    *("ARG", "FROM", "LABEL", "WORKDIR", "COPY", "RUN", "ENV", "USER", "EXPOSE", "HEALTHCHECK"),
    *("ENTRYPOINT", "CMD"),
}
OPTIONAL = PROJECT["project"]["optional-dependencies"]


def packages(requirements: list[str]) -> set[str]:
    matches = (re.match(r"[\w-]+", requirement) for requirement in requirements)
    return {match[0] for match in matches if match}


def steps(image: Path) -> list[tuple[str, str]]:
    """Return each instruction of a recipe and what follows it."""
    lines = [line for line in image.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n *", "", "\n".join(lines))
    return [(line.split()[0], line.partition(" ")[2]) for line in joined.splitlines()]


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_images_are_recipes(image: Path) -> None:
    instructions = [instruction for instruction, _ in steps(image)]
    assert set(instructions) <= INSTRUCTIONS
    assert instructions[-1] in ("CMD", "ENTRYPOINT")


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_images_run_as_a_user_and_listen_where_they_say(image: Path) -> None:
    instructions = dict(steps(image))
    assert int(instructions["USER"]) > 0  # what Kubernetes' runAsNonRoot wants: a number
    assert f"--uid {instructions['USER']} " in image.read_text()
    command = json.loads(instructions.get("ENTRYPOINT", instructions.get("CMD", "")))
    assert command[command.index("--port") + 1] == instructions["EXPOSE"]
    assert command[command.index("--host") + 1] == "0.0.0.0"
    assert f":{instructions['EXPOSE']}/health" in instructions["HEALTHCHECK"]


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_images_get_every_part_of_the_wheel(image: Path) -> None:
    copied = {
        source
        for instruction, words in steps(image)
        if instruction == "COPY"
        for source in words.split()[:-1]
    }
    assert {*PARTS} <= copied
    assert {source for source in copied if not (ROOT / source).exists()} == set()


def test_images_hold_the_supported_version() -> None:
    version = re.compile(r"(?<![\d.])\d+\.\d+\.\d+(?![\d.])")  # and not an address
    versions = {image.name: set(version.findall(image.read_text())) for image in IMAGES}
    assert versions == {"Dockerfile": {SUPPORTED_VERSION}, "Dockerfile.cpu": set()}


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_images_install_what_serves_and_nothing_else(image: Path) -> None:
    assert re.findall(r"pip install .*?('?\.\S*)$", image.read_text(), re.M) == ["'.[serve]'"]


def test_the_base_is_small() -> None:
    assert packages(PROJECT["project"]["dependencies"]) == {
        *("httpx", "pydantic", "pyyaml", "rich", "typer")
    }


def test_extras_bring_what_they_are_for() -> None:
    assert OPTIONAL["serve"] == [f"sglang=={SUPPORTED_VERSION}"]
    assert packages(OPTIONAL["eval"]) >= {"numpy", "scipy", "matplotlib", "transformers"}
    assert OPTIONAL["lab"][0] == "sglang-indexcache[eval]"
    assert packages(OPTIONAL["lab"]) >= {"safetensors", "torch"}
    assert "torch" not in packages(OPTIONAL["eval"])
    assert "sglang" not in packages(OPTIONAL["lab"] + OPTIONAL["eval"] + OPTIONAL["test"])
    assert set(EXTRAS.values()) <= set(OPTIONAL)


def test_the_version_is_the_engines_with_a_number_of_our_own() -> None:
    version = Version(__version__)
    assert version.base_version == SUPPORTED_VERSION
    assert version.is_postrelease
    assert str(version) == __version__
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def hook() -> Any:
    """Return ``hatch_build.py``, without what only a build has."""
    source = (ROOT / HOOK).read_text().replace("from hatchling", "# from hatchling")
    namespace: dict[str, Any] = {}
    exec(compile(re.sub(r"\(\w+HookInterface\)", "", source), HOOK, "exec"), namespace)
    return namespace


def test_the_guides_of_a_wheel_link_to_nothing_that_is_not_in_it() -> None:
    """A wheel holds the guides without benchmarks, examples and docker."""
    build_data: dict[str, dict[str, str]] = {"force_include": {}}
    hatch = hook()["GuidesHook"]()
    hatch.root, hatch.metadata = str(ROOT), SimpleNamespace(core=SimpleNamespace(urls={}))
    hatch.initialize("standard", build_data)
    inside = {
        to.removeprefix("sglang_indexcache/"): Path(file).read_text()
        for file, to in build_data["force_include"].items()
    }
    hatch.finalize("standard", build_data, "")
    guides = [*(ROOT / "docs").glob("*.md"), ROOT / "csrc/README.md"]
    assert {*inside} == {str(path.relative_to(ROOT)) for path in guides}
    linked = {
        normpath(Path(page).parent / target)
        for page, text in inside.items()
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", text)
    }
    assert linked
    assert linked <= {*inside}
    assert "(`benchmarks/results/heal.md`)" in inside["docs/heal.md"]


def test_the_long_description_has_no_link_that_needs_a_file_beside_it() -> None:
    portable, readme = hook()["portable"], (ROOT / "README.md").read_text()
    relative = re.compile(r"\]\((?!https?://|#)")
    assert relative.search(readme)
    assert not relative.search(portable(readme, None))
    assert not relative.search(portable(readme, "https://example.org/us/it"))
    text = "[a page](docs/search.md#how-do-i-run-it), [here](#install) ![seen](a/b.png)"
    assert portable(text, "https://example.org/it/") == (
        "[a page](https://example.org/it/blob/HEAD/docs/search.md#how-do-i-run-it), "
        "[here](#install) "
        "![seen](https://example.org/it/raw/HEAD/a/b.png)"
    )
    assert portable(text, None) == "a page (`docs/search.md`), [here](#install) "


def test_the_wheel_has_every_source_of_the_kernels() -> None:
    sources = [path for path in WHEEL["force-include"] if path.startswith("csrc/")]
    assert {path.name for path in (ROOT / "csrc").iterdir()} == {
        *(path.removeprefix("csrc/") for path in sources),
        "README.md",  # which the build adds
    }


def test_nothing_is_left_to_fill_in() -> None:
    assert PROJECT["project"]["authors"]
    assert PROJECT["project"]["urls"]
    for name in ("LICENSE", "CITATION.cff", "pyproject.toml"):
        assert not re.search(
            r"\[yyyy\]|\[name of|TODO|FIXME|example\.com", (ROOT / name).read_text()
        )


def test_an_installed_copy_says_where_its_guides_are() -> None:
    assert WHEEL["hooks"]["custom"]["path"] == HOOK
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "400"})
    assert str(ROOT / "docs") in result.output
