"""Eighty deployments in the shapes that people have: forty right ones, and forty with one fault each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from isochunk.deployment.finding import Finding
from isochunk.deployment.rules import RULES
from isochunk.deployment.rules.writing import WRITING
from tests.deployment.reading import found

RIGHT = Path(__file__).parent / "data" / "right"
FAULTS = yaml.safe_load((RIGHT.parent / "faults.yaml").read_text())
FILES = sorted(path for path in RIGHT.iterdir() if path.is_file())


def said(findings: list[Finding]) -> list[str]:
    return [f"{f.level} {f.rule} {f.node} line {f.line}: {f.what}" for f in findings if f.level != "note"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_right_deployment_is_called_right(path: Path) -> None:
    assert said(found(path.read_text(), path.name, path.parent)) == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault['of']}-{fault['rule']}")
def test_a_fault_is_found_with_its_remedy_and_nothing_else_is(fault: dict[str, Any]) -> None:
    text = (RIGHT / fault["of"]).read_text()
    assert text.count(fault["old"]) >= 1
    findings = found(text.replace(fault["old"], fault["new"], 1), fault["of"], RIGHT)
    hits = [f for f in findings if f.rule == fault["rule"] and f.level == "error"]
    assert hits, said(findings)
    assert any(fault["remedy"] in hit.remedy for hit in hits), [hit.remedy for hit in hits]
    others = [f for f in findings if f.level == "error" and f.rule not in (fault["rule"], *fault.get("also", []))]
    assert said(others) == []


def test_there_are_forty_of_each() -> None:
    assert len(FILES) >= 40
    assert len(FAULTS) >= 40
    assert {fault["rule"] for fault in FAULTS} <= {rule.name for rule in RULES} | set(WRITING)
