"""``indexcache demo``: see the difference on this machine."""

from __future__ import annotations

from pathlib import Path

from sglang_indexcache.cli.common import Command, Output, group, out

app = group("See on this machine what sharing does.")


@app.command("run", cls=Command, epilog="Example: indexcache demo run -o demo")
def demo_command(output: Output = Path(".demo")) -> None:
    """Serve a small model with every indexer and with a quarter of them, in turns. 3 to 5 minutes.

    Both servers answer the same questions and are timed on the same prompts. The output folder
    gets demo.json, with every sample, and the servers' logs.
    """
    import sglang  # noqa: F401  # first: the extra that brings it brings the rest

    from sglang_indexcache.demo.run import run

    run(output, out)
