"""Servers on the stage: SGLang's CUDA path, run on this machine with references for its kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.fixtures import stage
from tests.preloaded import PreloadedServer
from tests.rehearsal import checkpoint
from tests.rehearsal.questions import Judge
from tests.rehearsal.stage import mutants

HERE = Path(__file__).parent
ONE_SERVER_A_NAME = re.compile("test_(matrix|mutant)_server")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and "server" in item.path.name:
            item.add_marker(pytest.mark.e2e)


class OneWorkerAServer(LoadScopeScheduling):
    """Scheduler for ``--dist loadscope``: one worker runs the tests of one server.

    Not by ``loadgroup``, which xdist 3.8 ignores under pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        test, _, parameters = nodeid.partition("[")
        file, *inside = test.split("::")
        if len(inside) > 1:
            return f"{file} {inside[0]}"
        return f"{file} {parameters}" if ONE_SERVER_A_NAME.search(file) else file


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    return OneWorkerAServer(config, log) if config.getvalue("dist") == "loadscope" else None


Models = Callable[[str], Path]
Judges = Callable[..., Judge]
Rehearse = Callable[..., Any]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Return a function that makes the small checkpoint of a family, once."""

    @cache
    def of(family: str) -> Path:
        return checkpoint.make(tmp_path_factory.mktemp("checkpoint"), family)

    return of


@pytest.fixture(scope="session")
def judges(models: Models) -> Judges:
    """Return a function that gives the judge of a family's answers; it keeps what it has read."""
    return cache(lambda family, fp8_kv=False: Judge(models(family), fp8_kv))


@pytest.fixture(scope="session")
def rehearse(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Rehearse:
    """``with rehearse("--flag", ...) as client``: a server on the stage for that block.

    The client's ``log`` is the server's.
    """
    logs = tmp_path_factory.mktemp("logs")
    environment = stage.variables(tmp_path_factory.mktemp("driver"))

    @contextmanager
    def start(
        *arguments: str,
        backend: str = "indexcache",
        family: str = "glm-5",
        mutant: str = "",
        variables: Sequence[tuple[str, str]] = (),
    ) -> Iterator[Any]:
        command = [
            *("--model-path", str(models(family))),
            *("--attention-backend", backend),
            *("--mem-fraction-static", "0.5"),
            *("--max-total-tokens", "8192"),
            *arguments,
        ]
        log = logs / f"{len(list(logs.iterdir()))}.log"
        with PreloadedServer(
            command, log, env=environment, late={mutants.VARIABLE: mutant, **dict(variables)}
        ) as server:
            try:
                client = server.wait_until_ready()
                client.log = log  # type: ignore[attr-defined]
                yield client
            except BaseException as error:
                error.add_note(server.log_tail(60))
                raise
            finally:
                server.stop(grace=0)

    return start
