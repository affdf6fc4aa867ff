"""A node while it is read: what was found so far, and what can't be known."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from isochunk.deployment.command import Place
from isochunk.deployment.finding import Finding
from isochunk.deployment.wrappers import Serve

__all__ = ["STAND_IN", "Draft"]

# A number that stands in JSON for what only the shell knows; nobody writes it.
STAND_IN = 73_190_001
_OF_ASCEND = re.compile(
    r"MooncakeConnectorV1|MooncakeLayerwise|AscendStore|ConnectorStoreV1|\bnpu\b|ascend", re.IGNORECASE
)


@dataclass
class Draft:
    """Filled in step by step.

    Attributes:
        near: folder from which relative paths count.
        vllm: version of the vLLM whose options are read.
        unknown, whole: as of a `Node`.
    """

    serve: Serve
    near: Path
    vllm: str
    findings: list[Finding] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    whole: bool = True

    def place(self, word: str) -> Place:
        """Where a word stands."""
        command = self.serve.command
        return Place(command.place.file, getattr(word, "line", 0) or command.place.line)

    def find(self, rule: str, what: str, why: str, remedy: str, *, option: str = "", word: str = "") -> None:
        """Note an error of the way in which it is written."""
        place = self.place(word)
        self.findings.append(
            Finding(
                level="error",
                rule=rule,
                node="",
                option=option or None,
                file=place.file,
                line=place.line,
                what=what,
                why=why,
                remedy=remedy,
            )
        )

    def is_ascend(self, part: Sequence[str] = ()) -> bool:
        """Whether it runs on vLLM-Ascend, which is built on earlier versions of vLLM."""
        named = any(name.startswith(("ASCEND", "HCCL")) for name in self.serve.command.env)
        return named or any(_OF_ASCEND.search(word) for word in (*self.serve.arguments, *part))
