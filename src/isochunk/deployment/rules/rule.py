"""A rule: its name, what it states, and the function that looks for breaches. Rules register themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from isochunk.deployment.command import Place
from isochunk.deployment.finding import Finding, Level
from isochunk.deployment.node import Deployment, Front, Node

__all__ = ["RULES", "Fault", "Faults", "Rule", "error", "findings", "note", "of_deployment", "of_nodes", "warning"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A breach: whose, of which option, and what, why and the remedy."""

    level: Level
    of: Node | Front | str
    option: str | None
    what: str
    why: str
    remedy: str


Faults = Iterator[Fault]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that finds its breaches in a deployment; its name is unlike all others, ``states`` is for people."""

    name: str
    family: str
    states: str
    find: Callable[[Deployment], Faults]


RULES: list[Rule] = []


def of_nodes(name: str) -> Callable[[Callable[[Node], Faults]], Callable[[Node], Faults]]:
    """Register a rule that looks at each node by itself; its docstring is what it states."""

    def register(find: Callable[[Node], Faults]) -> Callable[[Node], Faults]:
        def everywhere(deployment: Deployment) -> Faults:
            for node in deployment.nodes:
                yield from find(node)

        _register(name, find, everywhere)
        return find

    return register


def of_deployment(name: str) -> Callable[[Callable[[Deployment], Faults]], Callable[[Deployment], Faults]]:
    """Register a rule that looks at all nodes together."""

    def register(find: Callable[[Deployment], Faults]) -> Callable[[Deployment], Faults]:
        _register(name, find, find)
        return find

    return register


def _register(name: str, described: Callable[..., Faults], find: Callable[[Deployment], Faults]) -> None:
    states = " ".join((described.__doc__ or "").split())
    RULES.append(Rule(name, described.__module__.rsplit(".", 1)[-1], states, find))


def error(of: Node | Front | str, option: str | None, what: str, why: str, remedy: str) -> Fault:
    """It does not start, or its answers are wrong."""
    return Fault("error", of, option, what, why, remedy)


def warning(of: Node | Front | str, option: str | None, what: str, why: str, remedy: str) -> Fault:
    """It works, and costs time or is a risk."""
    return Fault("warning", of, option, what, why, remedy)


def note(of: Node | Front | str, option: str | None, what: str, why: str, remedy: str) -> Fault:
    """Nothing is wrong; it could be better."""
    return Fault("note", of, option, what, why, remedy)


def findings(rule: Rule, deployment: Deployment) -> Iterator[Finding]:
    """What a rule finds, with places."""
    for fault in rule.find(deployment):
        place = _place(fault)
        name = fault.of if isinstance(fault.of, str) else fault.of.name if isinstance(fault.of, Node) else "proxy"
        yield Finding(
            level=fault.level,
            rule=rule.name,
            node=name,
            option=fault.option,
            file=place.file,
            line=place.line,
            what=fault.what,
            why=fault.why,
            remedy=fault.remedy,
        )


def _place(fault: Fault) -> Place:
    if isinstance(fault.of, Front):
        words = fault.of.options.get((fault.option or "").lstrip("-"), ())
        line = next((word.line for word in words if word.line), fault.of.place.line)
        return Place(fault.of.place.file, line)
    if not isinstance(fault.of, Node):
        return Place("")
    key = (fault.option or "").split(".")[0].lstrip("-").replace("-", "_")
    return fault.of.lines.get(key, fault.of.place)
