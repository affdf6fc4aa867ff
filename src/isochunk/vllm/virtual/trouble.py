"""Trouble on demand: what goes wrong with virtual stages, when, and for how long."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, get_type_hints

from isochunk.core.errors import ConfigError

__all__ = ["KINDS", "Cold", "Die", "Graphs", "Noise", "Resume", "Slow", "Stop", "Tiles", "Trouble", "parse", "read"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """One kind of trouble; seconds are the rehearsed machine's, and ``at`` counts from the first request."""

    kind: ClassVar[str]
    about: ClassVar[str]

    def as_dict(self) -> dict[str, Any]:
        """What `read` takes."""
        return {"kind": self.kind, **{k: v for k, v in asdict(self).items() if v is not None}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise(Trouble):
    """Every step's seconds on every stage times a log-normal number; some times ``tail`` as well."""

    kind: ClassVar[str] = "noise"
    about: ClassVar[str] = "log-normal noise on every step; a share `tails` of them takes `tail` times as long"
    sigma: float = field(default=0.05, metadata={"least": 0, "most": 3})
    tails: float = field(default=0.0, metadata={"least": 0, "most": 1})
    tail: float = field(default=5.0, metadata={"least": 1, "most": 1000})
    seed: int = field(default=0, metadata={"least": 0})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cold(Trouble):
    """The next ``steps`` steps take ``factor`` times as long: compilation, first use."""

    kind: ClassVar[str] = "cold"
    about: ClassVar[str] = "the next `steps` steps take `factor` times as long"
    steps: int = field(default=4, metadata={"least": 1})
    factor: float = field(default=10.0, metadata={"least": 1, "most": 1000})


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow(Trouble):
    """One stage, or all of them, takes ``factor`` times as long for ``seconds``; for ever without them."""

    kind: ClassVar[str] = "slow"
    about: ClassVar[str] = "one `stage`, or all, `factor` times as slow from `at` on for `seconds`"
    factor: float = field(default=2.0, metadata={"least": 0.01, "most": 1000})
    stage: int | None = field(default=None, metadata={"least": 0})
    at: float = field(default=0.0, metadata={"least": 0})
    seconds: float | None = field(default=None, metadata={"above": 0})


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Trouble):
    """One stage, or all of them, does nothing for ``seconds``; until it is told to resume without them."""

    kind: ClassVar[str] = "stop"
    about: ClassVar[str] = "one `stage`, or all, does nothing from `at` on for `seconds` (or until `resume`)"
    stage: int | None = field(default=None, metadata={"least": 0})
    at: float = field(default=0.0, metadata={"least": 0})
    seconds: float | None = field(default=None, metadata={"above": 0})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles(Trouble):
    """A step costs as much as one of the next multiple of ``tokens`` new tokens."""

    kind: ClassVar[str] = "tiles"
    about: ClassVar[str] = "a step costs what the next multiple of `tokens` new tokens costs"
    tokens: int = field(default=256, metadata={"least": 1})


@dataclass(frozen=True, slots=True, kw_only=True)
class Graphs(Trouble):
    """A step of more than ``tokens`` new tokens has no graph and takes ``factor`` times as long."""

    kind: ClassVar[str] = "graphs"
    about: ClassVar[str] = "steps of more than `tokens` new tokens take `factor` times as long"
    tokens: int = field(default=512, metadata={"least": 1})
    factor: float = field(default=1.3, metadata={"least": 0.01, "most": 1000})


@dataclass(frozen=True, slots=True, kw_only=True)
class Die(Trouble):
    """The worker of a stage dies."""

    kind: ClassVar[str] = "die"
    about: ClassVar[str] = "the worker of `stage` dies at `at`"
    stage: int = field(default=0, metadata={"least": 0})
    at: float = field(default=0.0, metadata={"least": 0})


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(Trouble):
    """All trouble ends but a dead worker's."""

    kind: ClassVar[str] = "resume"
    about: ClassVar[str] = "all trouble ends"


KINDS: dict[str, type[Trouble]] = {each.kind: each for each in (Noise, Cold, Slow, Stop, Tiles, Graphs, Die, Resume)}


def parse(text: str) -> Trouble:
    """What ``--trouble slow,stage=2,factor=3`` says.

    Raises:
        ConfigError: names what is wrong and what is known.
    """
    kind, *parts = text.split(",")
    data: dict[str, Any] = {"kind": kind}
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"--trouble {text}: {part!r} must be NAME=NUMBER, such as {kind},factor=3")
        try:
            number = float(value)
        except ValueError:
            raise ConfigError(f"--trouble {text}: {name} = {value!r} is not a number") from None
        data[name] = int(number) if number.is_integer() else number
    return read(data, where=f"--trouble {text}")


def read(data: Mapping[str, Any], *, where: str = "trouble", stages: int | None = None) -> Trouble:
    """Trouble from plain data, as ``POST /isochunk/rehearsal`` gets it.

    Args:
        stages: stages that there are, when that is known.

    Raises:
        ConfigError: names what is wrong and what is known.
    """
    values = dict(data)
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"{where}: kind {kind!r} must be one of {', '.join(KINDS)}")
    chosen = KINDS[kind]
    known = {each.name: each for each in fields(chosen)}
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            hint = f"; did you mean {near[0]!r}?" if near else f": {kind} takes none"
            raise ConfigError(f"{where}: {kind} knows no {name!r}{hint}")
        whole = "int" in str(get_type_hints(chosen)[name])
        values[name] = _number(f"{where}: {name}", value, whole, known[name].metadata)
    stage = values.get("stage")
    if stages is not None and stage is not None and stage >= stages:
        raise ConfigError(f"{where}: stage = {stage} must be below {stages}, the number of stages")
    return chosen(**values)


def _number(where: str, value: Any, whole: bool, limits: Mapping[str, float]) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{where} = {value!r} must be a number")
    if whole and not float(value).is_integer():
        raise ConfigError(f"{where} = {value!r} must be a whole number")
    least, most = limits.get("least", -math.inf), limits.get("most", math.inf)
    if not least <= value <= most or ("above" in limits and value <= limits["above"]):
        bounds = [f"at least {least:g}"] * (least > -math.inf) + [f"at most {most:g}"] * (most < math.inf)
        raise ConfigError(f"{where} = {value!r} must be {' and '.join(bounds) or 'above 0'}")
    return int(value) if whole else float(value)
