"""What a policy grants in a step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from isochunk.core.steps import Prefill

if TYPE_CHECKING:
    from isochunk.simulator.scheduler import Queue, Step, Steps

__all__ = ["ChunkPolicy", "Chunks", "Share"]


class Share:
    """vLLM's own way: each takes what it still needs, until the step is full.

    Attributes:
        aside: keys of prompts that have begun and sit this step out.
    """

    aside: Collection[str] = ()

    def limit(self, decodes: int, most: int) -> int:
        """Tokens of the step, decodes included, of ``most`` that vLLM allows."""
        return most

    def chunk(self, key: str, history: int, remaining: int, left: int) -> int:
        """Tokens of the next prompt, where so many are ``left`` in the step."""
        return min(remaining, left)


class Chunks(Share):
    """So many tokens of prompts in the order in which they were shown, and each what it was shown to get.

    Args:
        prompts: shown.
        tokens: of all of them.
        aside: as above.
    """

    def __init__(self, prompts: Iterable[Prefill], tokens: int, aside: Collection[str]) -> None:
        self.aside = aside
        self.given: dict[str, int] = {}
        for prompt in prompts:
            self.given[prompt.key] = size = min(tokens, prompt.remaining)
            tokens -= size
            if tokens <= 0:
                break

    def limit(self, decodes: int, most: int) -> int:
        """As above."""
        return min(sum(self.given.values()) + decodes, most)

    def chunk(self, key: str, history: int, remaining: int, left: int) -> int:
        """As above."""
        return min(remaining, left, self.given.get(key, 0))


class ChunkPolicy:
    """Decides the chunks of an instance's steps."""

    def share(self, queue: Queue, in_flight: Steps, now: float) -> Share:
        """What the step that begins now may hold; at least one prompt wants tokens."""
        raise NotImplementedError

    reorders = False  # whether those that wait are served in another order than they came

    def ranks(self, waiting: Sequence[Prefill]) -> list[tuple[float, float]]:
        """Where each prompt that has not begun stands among those that wait, the least first."""
        raise NotImplementedError

    def observe(self, step: Step) -> None:
        """A step has left the pipeline."""

    def refused(self) -> None:
        """Nobody could take anything of the last share, in which prompts were set aside."""
