"""``python -m benchmarks.stack``: where the time of bare decoder layers goes, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.stack import measure, tables
from benchmarks.stack.ops import load_ops
from sglang_indexcache.bench import figures
from sglang_indexcache.bench.results import save
from sglang_indexcache.bench.roofline import KV_BYTES
from sglang_indexcache.bench.shapes import shape_of
from sglang_indexcache.errors import BenchError, IndexCacheError
from sglang_indexcache.support.files import write_whole
from sglang_indexcache.support.lengths import parse_length

out = Console()
app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def main(
    output: Annotated[Path, typer.Option("--output", "-o", help="A .json file to write.")],
    model: Annotated[str, typer.Option(help="30b, glm-5, deepseek-v3.2 or a folder.")] = "30b",
    length: Annotated[
        list[str] | None, typer.Option(help="Prompt tokens: 4096, 200K or 16Ki. Repeat it.")
    ] = None,
    requests: Annotated[
        list[int] | None, typer.Option(help="Requests at once in decode; repeat it.")
    ] = None,
    cache_tokens: Annotated[
        str | None,
        typer.Option(help="Decode also as many requests as a KV cache of so many tokens holds."),
    ] = None,
    layers: Annotated[int, typer.Option(help="To run; the others are taken to cost the same.")] = 4,
    chunk: Annotated[int, typer.Option(help="Tokens of a prefill chunk.")] = 8192,
    repeats: Annotated[int, typer.Option(help="Of everything, F and S in turns.")] = 3,
    kernels: Annotated[
        str | None,
        typer.Option(
            help="cpu, auto (the best of ours here), cuda, triton, reference, or engine (DeepGEMM, "
            "SGLang's top-k, FlashMLA). Left out: cpu on a CPU, auto on a GPU."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    kv: Annotated[str, typer.Option(help="Latent cache of a GPU's kernels: bf16 or fp8.")] = "bf16",
) -> None:
    """The attention path of bare decoder layers: where the time goes, without a server."""
    shape = shape_of(model)
    if kv not in KV_BYTES:
        raise BenchError(f"the KV cache is {' or '.join(KV_BYTES)}, got {kv!r}")
    chosen = kernels or ("cpu" if device == "cpu" else "auto")
    result = measure.run(
        shape,
        load_ops(chosen, device, shape, fp8_kv=kv == "fp8"),
        tuple(parse_length(text) for text in length or ["10K", "60K", "120K", "200K"]),
        layers=layers,
        chunk=chunk,
        repeats=repeats,
        requests=tuple(requests or [1]),
        cache_tokens=parse_length(cache_tokens) if cache_tokens else 0,
        device=device,
        report=lambda result: out.print(tables.line(result.rows[-1]), highlight=False),
    )
    save(result, output)
    grids = [tables.breakdown_grid(result), *tables.speedup_grids(result)]
    write_whole(output.with_suffix(".md"), tables.report(result))
    for suffix in (".png", ".svg"):
        shares = tables.share_curves(result)
        figures.draw_shares(shares, output.with_name(f"{output.stem}-share{suffix}"))
        costs, unit = tables.cost_curves(result)
        figures.draw_scaling(costs, output.with_name(f"{output.stem}-scaling{suffix}"), unit)
    for grid in grids:
        out.print(grid.to_terminal())


if __name__ == "__main__":
    try:
        app(standalone_mode=True)
    except IndexCacheError as error:
        raise SystemExit(f"error: {error}") from None
