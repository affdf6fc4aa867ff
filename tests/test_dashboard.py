"""The dashboard and the alert rules ask only for metrics that exist."""

import contextlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.grafana_schema import faults

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


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian's package prometheus)")
    return found


def test_grafanas_schema_knows_all_of_the_dashboard() -> None:
    assert faults(json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("panels", 0, "gridPos", "x"), "0"),
        (("panels", 1, "targets", 0, "expression"), "up"),
        (("panels", 1, "targets", 0, "expr"), 7),
        (("panels", 1, "fieldConfig", "defaults", "unit"), True),
        (("panels", 5, "options", "calculation"), True),
        (("panels", 5, "options", "colour"), "red"),
        (("templating", "list", 1, "hide"), "never"),
        (("refresh",), 30),
        (("schemaversion",), 38),
    ],
)
def test_what_grafanas_schema_does_not_know_is_found(place: tuple[str | int, ...], value: object) -> None:
    """The other way round: this check can fail."""
    dashboard = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    inner = dashboard
    for step in place[:-1]:
        inner = inner[step] if isinstance(inner, list) else inner.setdefault(step, {})
    inner[place[-1]] = value
    with contextlib.suppress(TypeError, ValueError, AttributeError):  # the SDK itself refuses it
        assert faults(dashboard) != []


def test_promtool_takes_every_query_of_the_dashboard(promtool: str, tmp_path: Path) -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 15
    filled = [query.replace("$__rate_interval", "5m").replace("$instance", ".*") for query in queries]
    assert not any("$" in query for query in filled)
    rules = [{"record": f"panel:{index}", "expr": query} for index, query in enumerate(filled)]
    assert check_rules(promtool, tmp_path, rules) == ""
    assert check_rules(promtool, tmp_path, [*rules, {"record": "panel:broken", "expr": "rate(isochunk_steps_total)"}])


def check_rules(promtool: str, folder: Path, rules: list[dict[str, str]]) -> str:
    """What promtool has against these rules."""
    path = folder / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run([promtool, "check", "rules", path], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_promtool_takes_the_rules(promtool: str) -> None:
    done = subprocess.run(
        [promtool, "check", "rules", DOCS / "alerts.yml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# Samples each minute of an hour: what is well, and then what each rule is for. "0+5x60" grows by 5 a sample.
WELL = {
    "isochunk_healthy": "1x60",
    "isochunk_fallbacks_total": "7x60",
    "isochunk_harmful_total": "0x60",
    "isochunk_step_measured_seconds_total": "0+60x60",
    "isochunk_step_predicted_seconds_total": "0+61x60",
    "isochunk_stages": "4x60",
    'isochunk_model_seconds{coefficient="c0"}': "0.005x60",
    'isochunk_proxy_requests_total{outcome="ok"}': "0+9x60",
    'isochunk_proxy_requests_total{outcome="failed"}': "3x60",
    "isochunk_proxy_recomputed_total": "0x60",
}
TROUBLE = {
    "IsochunkIsBroken": {"isochunk_healthy": "1x30 0x30"},
    "IsochunkFallsBack": {"isochunk_fallbacks_total": "0x50 0+1x10"},
    "IsochunkPlansDoHarm": {"isochunk_harmful_total": "0+1x60"},
    "IsochunkMispredicts": {"isochunk_step_measured_seconds_total": "0+90x60"},
    "IsochunkHasNoModel": {'isochunk_model_seconds{coefficient="c0"}': "_x60"},
    "IsochunkProxyFails": {'isochunk_proxy_requests_total{outcome="failed"}': "0+1x60"},
    "IsochunkProxyRecomputes": {"isochunk_proxy_recomputed_total": "0+1x60"},
}


@pytest.mark.parametrize("trouble", [None, *TROUBLE])
def test_each_alert_fires_for_its_trouble_and_for_no_other(promtool: str, tmp_path: Path, trouble: str | None) -> None:
    rules = DOCS / "alerts.yml"
    names = re.findall(r"alert: (\w+)", rules.read_text())
    assert set(names) == set(TROUBLE)
    series = {**WELL, **(TROUBLE[trouble] if trouble else {})}
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)',
                "eval_time": "59m",
                "exp_samples": [{"labels": "{}", "value": int(name == trouble)}],
            }
            for name in names
        ],
    }
    path = tmp_path / "test.yml"
    path.write_text(json.dumps({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
