"""Whose turn the next step is: long prompts let those who have waited too long go between their steps."""

from __future__ import annotations

from collections.abc import Sequence

from isochunk.core.errors import PlanError
from isochunk.core.steps import Prefill

__all__ = ["Turns"]


class Turns:
    """Bounds how long the queue waits behind a long prompt, at the price of that prompt.

    A prompt that has waited longer than the bound and needs less than those that have begun before it takes every
    other step, so that prompts in its way are slowed down by at most a factor of two while it is served.

    Args:
        max_queue_delay: seconds that a prompt waits before it may go between the steps of longer ones; None lets it
            wait until they are done (first come, first served).

    Raises:
        PlanError: the bound is negative or no number.
    """

    def __init__(self, max_queue_delay: float | None = None) -> None:
        if max_queue_delay is not None and not max_queue_delay >= 0:
            raise PlanError(f"max_queue_delay = {max_queue_delay} must be at least 0 seconds")
        self._limit = max_queue_delay
        self._yielded = False

    def aside(self, queue: Sequence[Prefill], begun: int) -> frozenset[str]:
        """Keys of the prompts that sit out the next step; at least one prompt of the queue never does.

        Args:
            queue: prompts in the order in which they are served.
            begun: how many of them, from the first on, have had a step.
        """
        if self._limit is None or begun == 0:
            return frozenset()
        late = [prompt.remaining for prompt in queue[1:] if prompt.waited_s > self._limit]
        longer: frozenset[str] = frozenset()
        if late and not self._yielded:
            least = min(late)
            longer = frozenset(prompt.key for prompt in queue[:begun] if prompt.remaining > least)
        self._yielded = bool(longer)
        return longer
