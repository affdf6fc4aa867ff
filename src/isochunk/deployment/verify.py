"""What vLLM's configuration objects say of nodes that its parser takes, as far as that needs no device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from isochunk.deployment.finding import Finding
from isochunk.deployment.node import Deployment, Node
from isochunk.deployment.vllm_parser import VllmParser

__all__ = ["verify"]

# Said better by rules of ours.
_SAID = {
    "greater than the derived max_model_len": "length-within-positions",
    "is smaller than max_model_len": "step-holds-prompt",
    "must be greater than or equal to max_num_seqs": "step-holds-requests",
}


def verify(deployment: Deployment, parser: VllmParser, found: Sequence[Finding]) -> list[Finding]:
    """What vLLM refuses and nothing else has said yet."""
    said = {(finding.node, finding.rule) for finding in found}
    return [
        _finding(node, complaint)
        for node in deployment.nodes
        for complaint in parser.complaints(node.words, node.env, _folder(node))
        if not any(mark in complaint and (node.name, rule) in said for mark, rule in _SAID.items())
    ]


def _folder(node: Node) -> str | None:
    """The model's folder, where its configuration was read from there."""
    try:
        return node.model if node.model and Path(node.model, "config.json").is_file() else None
    except (OSError, ValueError):
        return None


def _finding(node: Node, complaint: str) -> Finding:
    return Finding(
        level="error",
        rule="vllm-says",
        node=node.name,
        file=node.place.file,
        line=node.place.line,
        what=complaint.split("[type=", maxsplit=1)[0].strip()[:400],
        why="vLLM's own configuration refuses it",
        remedy="do as it says",
    )
