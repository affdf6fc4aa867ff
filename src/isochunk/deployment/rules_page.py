"""docs/check.md's list of rules, made from the rules: ``python -m isochunk.deployment.rules_page docs/check.md``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from isochunk.deployment.rules import RULES
from isochunk.deployment.rules.writing import WRITING

__all__ = ["BEGIN", "END", "rules_page", "with_rules"]

BEGIN, END = "<!-- rules: made from src/isochunk/deployment/rules, don't edit -->\n", "<!-- end of rules -->\n"


def rules_page() -> str:
    """A table for each family."""
    families = dict.fromkeys(rule.family for rule in RULES)
    parts = [_table("How it is written", [*WRITING.items(), *_of("writing")])]
    for family in families:
        if family != "writing":
            module = importlib.import_module(f"isochunk.deployment.rules.{family}")
            title = " ".join((module.__doc__ or "").split()).rstrip(".")
            parts.append(_table(title, _of(family)))
    return "\n".join(parts)


def _of(family: str) -> list[tuple[str, str]]:
    return [(rule.name, rule.states) for rule in RULES if rule.family == family]


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    return "\n".join(
        [f"### {title}\n", "| rule | states |", "| --- | --- |", *(f"| `{n}` | {s} |" for n, s in rows), ""]
    )


def with_rules(page: str) -> str:
    """A page with its list of rules renewed."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{rules_page()}\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_rules(path.read_text(encoding="utf-8")), encoding="utf-8")
