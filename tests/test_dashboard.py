"""The dashboard and the alert rules ask only for metrics that exist."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
NAMES = re.compile(r"\bisochunk_[a-z_]+")


def known() -> set[str]:
    documented = set(re.findall(r"`(isochunk_[a-z_]+)`", (DOCS / "metrics.md").read_text(encoding="utf-8")))
    histograms = {f"{name}_{part}" for name in documented for part in ("bucket", "sum", "count")}
    return documented | histograms


def test_every_panel_and_rule_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    asked = {
        name for panel in dashboard["panels"] for target in panel["targets"] for name in NAMES.findall(target["expr"])
    }
    asked |= {name for line in (DOCS / "alerts.yml").read_text().splitlines() for name in NAMES.findall(line)}
    assert len(asked) > 15
    assert sorted(asked - known()) == []


def test_the_dashboard_is_whole() -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {"datasource", "instance"}


def test_promtool_takes_the_rules() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian's package prometheus)")
    done = subprocess.run(
        [promtool, "check", "rules", DOCS / "alerts.yml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
