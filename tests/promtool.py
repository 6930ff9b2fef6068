"""The shipped alert rules, unit-tested by the promtool that comes with Prometheus."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

RULES = Path(__file__).parents[1] / "docker" / "monitoring" / "rules.yaml"
needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="it is Prometheus' own")


def check_rules(folder: Path, series: dict[str, str], alerts: list[dict[str, Any]]) -> None:
    """Fail unless exactly ``alerts`` fire.

    Args:
        folder: to write files into.
        series: by name and labels, a value for each minute, as promtool writes them.
        alerts: by :func:`alert`.
    """
    rules = yaml.safe_load(RULES.read_text())
    for rule in rules["groups"][0]["rules"]:
        del rule["annotations"]
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    case = {"interval": "1m", "input_series": inputs, "alert_rule_test": alerts}
    (folder / "test.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [case]})
    )
    for command in (["check", "rules", str(RULES)], ["test", "rules", str(folder / "test.yaml")]):
        process = subprocess.run(
            ["promtool", *command], capture_output=True, text=True, check=False
        )
        assert process.returncode == 0, process.stdout + process.stderr


def alert(name: str, minute: int, *fires: dict[str, str]) -> dict[str, Any]:
    """Demand that ``name`` fires at ``minute`` for series with these labels, and for no others."""
    expected = [{"exp_labels": labels} for labels in fires]
    return {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": expected}
