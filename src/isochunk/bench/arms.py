"""What an A/B compares: policies and fixed sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from isochunk.core.errors import ConfigError
from isochunk.core.planner import POLICIES, Policy

__all__ = ["Arm", "policy_arms", "powers_of_two", "sweep_arms"]


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy and its size: the fixed size, or the first chunk of ``first_chunk``; None for ``optimal``."""

    policy: Policy
    chunk: int | None = None

    @property
    def label(self) -> str:
        """What tables and figures call it."""
        if self.policy == "optimal":
            return "isochunk"
        return f"{'fixed' if self.policy == 'fixed' else 'first chunk'} {self.chunk}"


def policy_arms(names: Iterable[str], largest: int) -> list[Arm]:
    """Arms of named policies, with vLLM's own size ``largest`` (``max_num_batched_tokens``).

    Raises:
        ConfigError: a name is no policy.
    """
    arms = []
    for name in names:
        policy = next((known for known in POLICIES if known == name), None)
        if policy is None:
            raise ConfigError(f"policy {name!r} must be one of {', '.join(POLICIES)}")
        arms.append(Arm(policy, None if policy == "optimal" else largest))
    return arms


def sweep_arms(sizes: Sequence[int], largest: int) -> list[Arm]:
    """Arms of fixed sizes.

    Raises:
        ConfigError: a size is above what a step of this server holds.
    """
    for size in sizes:
        if not 1 <= size <= largest:
            raise ConfigError(
                f"fixed size {size} must be from 1 to {largest}, the server's max_num_batched_tokens; "
                "leave it out or restart the server with a larger one"
            )
    return [Arm("fixed", size) for size in sizes]


def powers_of_two(largest: int, smallest: int = 128) -> list[int]:
    """Sizes to sweep: ``smallest`` and its doubles up to ``largest``, which is always among them."""
    sizes = []
    while smallest < largest:
        sizes.append(smallest)
        smallest *= 2
    return [*sizes, largest]
