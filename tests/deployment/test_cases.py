"""Small deployments, right ones and ones with a fault, each with the rules that must speak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from isochunk.core.errors import ConfigError
from tests.deployment.reading import found

CASES = yaml.safe_load((Path(__file__).parent / "data" / "cases.yaml").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_these_rules_speak_and_no_others(case: dict[str, Any]) -> None:
    try:
        rules = {finding.rule for finding in found(case["text"], case["file"]) if finding.level != "note"}
    except ConfigError:
        rules = {"CONFIG"}
    assert rules == set(case["rules"])
