"""``python -m benchmarks.stack``: where the time of bare decoder layers goes, without a server."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from benchmarks.stack import measure, tables
from benchmarks.stack.ops import load_ops
from sglang_indexcache.bench import figures
from sglang_indexcache.bench.results import save
from sglang_indexcache.bench.roofline import KV_BYTES
from sglang_indexcache.bench.shapes import shape_of
from sglang_indexcache.cli.common import CONTEXTS, ContextsOption, OutputOption, out
from sglang_indexcache.errors import BenchError, IndexCacheError
from sglang_indexcache.support.files import write_whole
from sglang_indexcache.support.lengths import parse_length

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def stack_command(
    output: OutputOption,
    model: Annotated[
        str, typer.Option(help="The checkpoint's folder, or 30b, glm-5 or deepseek-v3.2.")
    ] = "30b",
    context: ContextsOption = None,
    requests: Annotated[
        list[int] | None, typer.Option(help="How many requests decode at once. Repeat it.")
    ] = None,
    cache_tokens: Annotated[
        str | None,
        typer.Option(help=f"Decode also what fills a KV cache of this length: {CONTEXTS}."),
    ] = None,
    layers: Annotated[
        int, typer.Option(help="How many layers run; the others are taken to cost the same.")
    ] = 4,
    chunk: Annotated[int, typer.Option(help="Tokens of a prefill chunk.")] = 8192,
    repeats: Annotated[int, typer.Option(help="How often F and S layers have their turn.")] = 3,
    kernels: Annotated[
        str | None,
        typer.Option(
            help="cpu, auto (the best of ours here), cuda, triton, reference, or engine (DeepGEMM, "
            "SGLang's top-k, FlashMLA). Left out: cpu on a CPU, auto on a GPU."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to run: cpu or cuda.")] = "cpu",
    kv: Annotated[
        str, typer.Option(help="Layout of the latent cache that a GPU's kernels read: bf16 or fp8.")
    ] = "bf16",
) -> None:
    """The attention path of bare decoder layers: where the time goes, without a server."""
    shape = shape_of(model)
    if kv not in KV_BYTES:
        raise BenchError(f"the KV cache is {' or '.join(KV_BYTES)}, got {kv!r}")
    chosen = kernels or ("cpu" if device == "cpu" else "auto")
    result = measure.run(
        shape,
        load_ops(chosen, device, shape, fp8_kv=kv == "fp8"),
        tuple(parse_length(text) for text in context or ("10K", "60K", "120K", "200K")),
        layers=layers,
        chunk=chunk,
        repeats=repeats,
        requests=tuple(requests or [1]),
        cache_tokens=parse_length(cache_tokens) if cache_tokens else 0,
        device=device,
        report=lambda result: out.print(tables.line(result.rows[-1]), highlight=False),
    )
    save(result, output / "stack.json")
    write_whole(output / "stack.md", tables.report(result))
    figures.draw_shares(tables.share_curves(result), output / "stack-share.png")
    figures.draw_scaling(*tables.cost_curves(result), output / "stack-scaling.png")
    for grid in [tables.breakdown_grid(result), *tables.speedup_grids(result)]:
        out.print(grid.to_terminal())


def main(arguments: list[str] | None = None) -> None:
    """Run the command; an error is one line and exit code 1."""
    try:
        app(arguments)
    except IndexCacheError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
