"""What `isochunk check` has found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

__all__ = ["Finding", "Level"]

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found: errors stop the deployment or spoil answers, warnings cost time or are a risk, notes advise.

    Attributes:
        rule: name of the rule, as in docs/check.md.
        node: what is wrong: a node's name, ``proxy`` or ``deployment``.
        option: the option or variable, where one is to blame.
        file, line: where that stands; line 0 when the place has none.
        what, why, remedy: the fault, why it breaks, and what to do.
    """

    level: Level
    rule: str
    node: str
    what: str
    why: str
    remedy: str
    option: str | None = None
    file: str = ""
    line: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def of(self, node: str) -> Finding:
        """The same of a node that has its name only now."""
        return replace(self, node=node)
