"""The dispatch table as ``indexcache kernels list`` prints it."""

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from sglang_indexcache.kernels import dispatch


def print_table(machine: dispatch.Machine, out: Console) -> None:
    """What would run every op on ``machine``, and why not something else."""
    capability = machine.capability
    card = "" if capability is None else f", compute capability {capability[0]}.{capability[1]}"
    out.print(f"{machine.name}{card}")
    table = Table("op", "default", "opted in", "why not", box=SIMPLE)
    table.columns[0].no_wrap = True
    decisions = dispatch.table(machine)
    for decision in decisions:
        passed_over = [f"{v.implementation}: {v.why}" for v in decision.verdicts if not v.runs]
        table.add_row(decision.op, decision.default, decision.opt_in, "\n".join(passed_over))
    out.print(table)
    for why in dict.fromkeys(decision.why for decision in decisions):
        out.print(f"default: {why}")
