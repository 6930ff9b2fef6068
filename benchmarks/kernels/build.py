"""Compile one folder of ``csrc/``, or find it in the cache: a line of JSON.

python -m benchmarks.kernels.build topk
"""

import json
import sys
import time

from sglang_indexcache.errors import KernelError
from sglang_indexcache.kernels.build import build


def main() -> None:
    """Build the folder that the command line names."""
    started = time.perf_counter()
    try:
        problem = None
        build(sys.argv[1])
    except KernelError as error:
        problem = str(error)
    seconds = time.perf_counter() - started
    print(json.dumps({"folder": sys.argv[1], "seconds": seconds, "problem": problem}))


if __name__ == "__main__":
    main()
