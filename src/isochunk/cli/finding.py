"""What `isochunk check` has found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from isochunk.cli.deployment import Server

__all__ = ["Finding", "Findings", "error", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong: an error stops the deployment or makes its answers wrong; a warning costs time."""

    level: Literal["error", "warning"]
    where: str
    what: str
    remedy: str

    def as_dict(self) -> dict[str, str]:
        """Plain data for JSON."""
        return asdict(self)


Findings = Iterator[Finding]


def error(server: Server | str, what: str, remedy: str) -> Finding:
    """The deployment does not start, or its answers are wrong."""
    return Finding("error", server if isinstance(server, str) else server.name, what, remedy)


def warning(server: Server | str, what: str, remedy: str) -> Finding:
    """The deployment works, and costs time."""
    return Finding("warning", server if isinstance(server, str) else server.name, what, remedy)
