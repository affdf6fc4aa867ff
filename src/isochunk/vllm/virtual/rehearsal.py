"""What is rehearsed: `isochunk rehearse` writes it into the environment, vLLM's processes read it there."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from isochunk.core.errors import ConfigError
from isochunk.core.profile import Profile
from isochunk.core.published import known_profile
from isochunk.vllm.virtual.stages import Stages
from isochunk.vllm.virtual.trouble import parse

__all__ = ["VARIABLE", "Rehearsal", "absolute", "rehearsal_of"]

VARIABLE = "ISOCHUNK_REHEARSAL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The virtual stages of a server. Seconds are the rehearsed machine's.

    Attributes:
        profile: path of a profile file, or the name of a published one.
        hand_over: seconds from a stage to the next.
        back: seconds from the last stage to the engine.
        speed: how much faster than the rehearsed machine the clocks run.
        kv_tokens: tokens that the KV cache holds; None is four prompts of the longest kind.
        answer_tokens: the virtual model ends its answers after so many tokens, unless a request ignores that.
        troubles: what goes wrong, each as `trouble.parse` takes it.
        channel: name of the socket through which more can go wrong at run time.
    """

    profile: str
    hand_over: float = 0.0
    back: float = 0.0
    speed: float = 1.0
    kv_tokens: int | None = None
    answer_tokens: int = 256
    troubles: tuple[str, ...] = ()
    channel: str = field(default_factory=lambda: f"isochunk-{secrets.token_hex(8)}")

    def __post_init__(self) -> None:
        for name, value in (("--hand-over", self.hand_over), ("--return-time", self.back)):
            if not 0 <= value < 1e3:
                raise ConfigError(f"{name} {value:g} must be seconds from 0 to 1000")
        if not 0 < self.speed <= 1e4:
            raise ConfigError(f"--speed {self.speed:g} must be above 0 and at most 10000")
        for name, count in (("--kv-tokens", self.kv_tokens), ("--answer-tokens", self.answer_tokens)):
            if count is not None and count < 1:
                raise ConfigError(f"{name} {count} must be at least 1")
        for text in self.troubles:
            parse(text)

    def stages(self, count: int) -> Stages:
        """The virtual stages of a server with so many.

        Raises:
            ConfigError: the profile has a model for each of another number of stages, or a trouble names a stage
                that is not there.
            ProfileError: the profile can't be read.
        """
        troubles = [parse(text) for text in self.troubles]
        for text, trouble in zip(self.troubles, troubles, strict=True):
            stage = getattr(trouble, "stage", None)
            if stage is not None and stage >= count:
                raise ConfigError(f"--trouble {text}: stage = {stage} must be below {count}, the number of stages")
        return Stages(
            self._models(count),
            decode=self.known().decode,
            hand_over=self.hand_over,
            back=self.back,
            speed=self.speed,
            troubles=troubles,
        )

    def known(self) -> Profile:
        """The profile.

        Raises:
            ProfileError: it can't be read, and is no published one.
        """
        return known_profile(self.profile)

    def key(self) -> str:
        """What tells this rehearsal's costs from another's."""
        profile = self.known()
        costs = [repr(part) for part in (profile.model, profile.stage_models, profile.decode)]
        told = [costs, self.hand_over, self.back, self.speed, self.troubles]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]

    def as_environ(self) -> dict[str, str]:
        """The variable that vLLM's processes read."""
        return {VARIABLE: json.dumps(asdict(self))}

    def _models(self, count: int) -> tuple[Any, ...]:
        profile = self.known()
        if not profile.stage_models:
            return (profile.model,) * count
        if len(profile.stage_models) != count:
            raise ConfigError(
                f"--profile {self.profile} holds models of {len(profile.stage_models)} stages, "
                f"--pipeline-parallel-size is {count}: make them equal"
            )
        return profile.stage_models


def rehearsal_of(environ: Mapping[str, str]) -> Rehearsal | None:
    """The rehearsal that this process is part of, if any."""
    text = environ.get(VARIABLE)
    return _read(text) if text else None


@lru_cache(maxsize=4)
def _read(text: str) -> Rehearsal:
    data = json.loads(text)
    data["troubles"] = tuple(data.get("troubles", ()))
    return Rehearsal(**data)


def absolute(profile: str) -> str:
    """The same profile for a process that works in another folder."""
    return str(Path(profile).resolve()) if Path(profile).exists() else profile
