"""A command as somebody wrote it, before anybody reads its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from isochunk.deployment.finding import Finding

__all__ = ["UNKNOWN", "Command", "Place", "Word", "is_unknown", "locate"]

UNKNOWN = "\ue000"  # stands in a word for what only the shell that runs it knows


def is_unknown(text: object) -> bool:
    """Whether a word holds something that is not written down, such as a variable set elsewhere."""
    return isinstance(text, str) and UNKNOWN in text


def locate(name: str, near: Path) -> Path:
    """A file that a command names: from where we are, else beside the file in which the command stands."""
    try:
        return Path(name) if Path(name).exists() else near / name
    except (OSError, ValueError):  # a name that no file can have
        return near / name


@dataclass(frozen=True, slots=True)
class Place:
    """A file, or what stands for one, and a line of it; line 0 when there is none."""

    file: str
    line: int = 0


class Word(str):
    """A word of a command that knows its line."""

    __slots__ = ("line",)
    line: int

    def __new__(cls, text: str, line: int = 0) -> Word:
        """A word of that text, written in that line."""
        word = super().__new__(cls, text)
        word.line = line
        return word


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Words, environment and machine of one command.

    Attributes:
        words: without assignments and redirections.
        env: the variables that are set for it; those that the shell has but does not export are not among them.
        place: where it stands.
        name: what messages call it; empty: to be made from the role.
        role: ``prefill`` or ``decode`` where the file says it.
        host: where it runs, when the file says it.
        published: pairs of a host's port and the container's port that it leads to.
        image: the container's image; ``contained``: it is a container on the machine of the others of its file.
        foreground: whether a script waits for its end, so that what comes later does not run beside it.
        clustered: whether its script joins a cluster of machines, so that its own devices say nothing.
        devices: how many accelerators it is given, when something says it.
        findings: what was wrong already in the way it is written.
        device_gib: memory of one device.
        model_config: path of the model's ``config.json``.
    """

    words: tuple[Word, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    place: Place = Place("the command")
    name: str = ""
    role: str | None = None
    host: str | None = None
    published: tuple[tuple[int, int], ...] = ()
    image: str = ""
    contained: bool = False
    foreground: bool = False
    clustered: bool = False
    devices: int | None = None
    findings: tuple[Finding, ...] = ()
    device_gib: float | None = None
    model_config: str | None = None
