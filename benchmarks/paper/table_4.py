"""Table 4 and the first figure: does a large model keep its answers under published patterns?

    python -m benchmarks.paper.table_4 --quick
    python -m benchmarks.paper.table_4 --model /models/GLM-5-FP8 --url http://localhost:30000

On a server in live mode that you name, GLM-5's patterns are evaluated at 32K tokens and more, each
with a verdict. Without one, this machine's CPU serves the small trained model: the same questions
and statistics, and nothing about GLM-5. Writes the folder large_model.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from benchmarks.paper import SMALL, indexcache, live_server, repeated
from benchmarks.records import read_arguments

PATTERNS = ["1/2", "uniform:1/4", "1/4"]
SMALLS = ["--task", "notes", "--length", "256", "--length", "512", "--margin", "3"]
"""What a model of 512 tokens is asked."""
QUICK = {"contexts": 4}


def main(argv: list[str] | None = None) -> None:
    """Evaluate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a checkpoint's folder; then also --url")
    parser.add_argument("--url", nargs="+", default=[], help="of a server in live mode")
    parser.add_argument("--pattern", nargs="+", default=PATTERNS)
    parser.add_argument("--contexts", type=int, default=32, help="of each task and length")
    arguments = read_arguments(parser, "large_model", argv, QUICK)
    if (arguments.model is None) != (not arguments.url):
        parser.error("--model and --url go together")
    with ExitStack() as stack:
        urls, options = arguments.url, []
        if not urls:
            log = arguments.output / "server.log"
            urls, options = [stack.enter_context(live_server(SMALL, log))], SMALLS
        indexcache(
            *("eval", "run", *arguments.pattern, "--model", arguments.model or SMALL),
            *("--output", arguments.output, "--contexts", str(arguments.contexts)),
            *repeated("--url", urls),
            *options,
        )


if __name__ == "__main__":
    main()
