"""What a policy grants in a step."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isochunk.simulator.scheduler import Queue, Step, Steps

__all__ = ["ChunkPolicy", "Share"]


class Share:
    """vLLM's own way: each takes what it still needs, until the step is full.

    Args:
        tokens: of prompts, in the step; None for as many as vLLM allows.
        aside: keys of prompts that have begun and sit this step out.
    """

    def __init__(self, tokens: int | None = None, aside: Collection[str] = ()) -> None:
        self.tokens, self.aside = tokens, aside

    def limit(self, decodes: int, most: int) -> int:
        """Tokens of the step, decodes included."""
        return most if self.tokens is None else min(max(self.tokens + decodes, 1), most)

    def chunk(self, key: str, history: int, remaining: int, left: int) -> int:
        """Tokens of the next prompt, of which so many are ``left`` in the step; 0 ends the step."""
        return min(remaining, left)


class ChunkPolicy:
    """Decides the chunks of an instance's steps."""

    def share(self, queue: Queue, in_flight: Steps, now: float) -> Share:
        """What the step that begins now may hold; at least one prompt wants tokens."""
        raise NotImplementedError

    def observe(self, step: Step) -> None:
        """A step has left the pipeline."""

    def refused(self) -> None:
        """Nobody could take anything of the last share, in which prompts were set aside."""
