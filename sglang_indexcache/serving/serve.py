"""Entry point ``sglang.serve_backends``: ``sglang serve --model-type indexcache``.

The ordinary language-model server with the plugins loaded first, so that ``--help`` shows our
flags. Serving itself needs no ``--model-type``: the automatic choice serves DSA models too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.cli.serve_backends import ServeBackend, ServeRequest


def backend() -> ServeBackend:
    """Called by SGLang when the backend is named."""
    from sglang.cli.serve_backends import SERVE_BACKEND_API_VERSION, ServeBackend

    return ServeBackend(api_version=SERVE_BACKEND_API_VERSION, run=_run)


def _run(request: ServeRequest) -> None:
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args(list(request.argv)))  # exits by itself after --help
