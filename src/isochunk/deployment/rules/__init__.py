"""What can be wrong with a deployment: a file a family, a function a rule."""

from __future__ import annotations

from isochunk.deployment.finding import Finding
from isochunk.deployment.node import Deployment
from isochunk.deployment.rules import (  # noqa: F401 importing registers them
    chunks,
    connectors,
    context,
    devices,
    fronts,
    groups,
    ports,
    same,
    schedulers,
    sizes,
    writing,
)
from isochunk.deployment.rules.rule import RULES, findings

__all__ = ["RULES", "check"]

_ORDER = {"error": 0, "warning": 1, "note": 2}


def check(deployment: Deployment) -> list[Finding]:
    """All findings, errors first."""
    found = [finding for node in deployment.nodes for finding in node.reading]
    found += [finding for rule in RULES for finding in findings(rule, deployment)]
    return sorted(dict.fromkeys(found), key=lambda finding: _ORDER[finding.level])
