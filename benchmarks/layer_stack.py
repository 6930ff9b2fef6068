"""The layer-stack benchmark as a script, for machines where the package is not installed.

python benchmarks/layer_stack.py --device cuda --kernels triton -o stack.json
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


def main() -> None:
    """Run ``indexcache bench layer-stack``."""
    import typer

    from sglang_indexcache.bench.cli import layer_stack_command

    typer.run(layer_stack_command)


if __name__ == "__main__":
    main()
