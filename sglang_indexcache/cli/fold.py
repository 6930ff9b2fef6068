"""``indexcache fold``: fit what folded indexers need."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.box import SIMPLE
from rich.table import Table
from typer import Option

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.cli.common import DOCUMENTS, Command, Model, group, out
from sglang_indexcache.errors import SettingsError
from sglang_indexcache.pattern import SLOPES_FILE
from sglang_indexcache.support.files import check_writable
from sglang_indexcache.support.lengths import parse_length

if TYPE_CHECKING:
    from sglang_indexcache.library import Slopes

app = group("Fold indexers: one dot product in place of all heads (experimental).")

# fmt: off
SlopesFile = Annotated[Path, Option("--output", "-o", metavar="FILE.slopes", help=
    "The file that is written.")]
Data = Annotated[str, Option("--data", metavar="PATH", help=
    f"Documents to fit to: {DOCUMENTS}")]
Context = Annotated[str | None, Option("--context", metavar="LENGTH", help=
    "Most tokens of a document; the default is 8 times what a query selects.")]
Texts = Annotated[int, Option("--texts", min=1, metavar="N", help=
    "Documents that slopes are fitted to.")]
HeldOut = Annotated[int, Option("--held-out", min=1, metavar="N", help=
    "Further documents, on which the missed picks are counted.")]
Dtype = Annotated[str, Option("--dtype", metavar="float32|bfloat16", help=
    "What transformers computes in.")]
# fmt: on


@app.command("calibrate", cls=Command)
def calibrate_command(
    model: Model,
    output: SlopesFile,
    data: Data = "machine",
    context: Context = None,
    texts: Texts = 4,
    held_out: HeldOut = 2,
    dtype: Dtype = "float32",
) -> None:
    """Fit the slopes by which a checkpoint's indexers fold, and tell how well each layer does.

    Patterns that fold name the file: full+c4@FILE.slopes. It is one forward for each document, in
    transformers, with the memory to hold the model.

    Example: indexcache fold calibrate --model MODEL --data chats.jsonl -o MODEL.slopes
    """
    check_writable(output.parent)
    if output.suffix != SLOPES_FILE:
        raise SettingsError(f"--output {output} must end in {SLOPES_FILE}, by which it is known")
    if dtype not in ("float32", "bfloat16"):
        raise SettingsError(f"--dtype is float32 or bfloat16, got {dtype!r}")
    from sglang_indexcache.search.calibration import Score
    from sglang_indexcache.search.fold_slopes import calibrate
    from sglang_indexcache.search.setup import Setup
    from sglang_indexcache.study.journal import progress_at_most

    Checkpoint.read(model).check_trained(str(model))
    length = None if context is None else parse_length(context)
    setup = Setup.read(
        model, data, context=length, batches=texts, held_out=held_out, score=Score.ALL
    )
    out.print(f"data  {setup.data}: {setup.calibration.reading}", highlight=False)
    with progress_at_most(out) as progress:
        layers = len(setup.checkpoint.own.full_layers) * len(setup.calibration.sequences)
        task = progress.add_task("layers of texts", total=layers)
        slopes = calibrate(model, setup, output, dtype, lambda: progress.advance(task))
    _print_slopes(slopes)


def _print_slopes(slopes: Slopes) -> None:
    """Print what each layer misses, and which stay exact."""
    columns = ("c = 1 (L)", "c = 2", "c = 4")
    table = Table("layer", *columns, box=SIMPLE, title="exact picks missed, %")
    layers = {n: layer for n, layer in enumerate(slopes.layers) if layer is not None}
    for number, layer in layers.items():
        table.add_row(str(number), *(f"{100 * share:.1f}" for share in layer.missed.values()))
    out.print(table)
    if exact := [str(number) for number, layer in layers.items() if not layer.folds]:
        out.print(
            f"fold badly and stay exact: layers {', '.join(exact)}. Make them F where a pattern "
            "has L.",
            style="yellow",
            highlight=False,
        )
    out.print(
        f"wrote {slopes.path} ({slopes.digest}), for patterns such as full+c4@{slopes.path}",
        soft_wrap=True,
        highlight=False,
    )
