"""Whose turn it is: who of those that wait is served first, and long prompts that let others go between their steps."""

from __future__ import annotations

from collections.abc import Sequence

from isochunk.core.cost import CostModel
from isochunk.core.errors import PlanError
from isochunk.core.steps import Prefill

__all__ = ["Turns", "rank"]

_PAUSE = 64  # steps without turns after one that nobody could take


def rank(model: CostModel, prompt: Prefill, longest_wait_s: float) -> tuple[float, float]:
    """Where a prompt that has not begun stands among those that wait: the least rank is served first.

    Least predicted work first, but whoever has waited ``longest_wait_s`` goes before all who have not, in order of
    arrival. So nobody is passed any more after that time.
    """
    if prompt.waited_s >= longest_wait_s:
        return -1.0, -prompt.waited_s
    return model.work(prompt.history, prompt.history + prompt.remaining), -prompt.waited_s


class Turns:
    """Bounds how long the queue waits behind a long prompt, at the price of that prompt.

    Where the first prompt behind those that have begun has waited longer than the bound and needs less than they
    do, it takes every other step, so that the others are slowed down by at most a factor of two while it is served.
    The order of the queue is kept: a short prompt behind a long one that has not begun waits for its turn.

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
        self._pause = 0

    @property
    def bounded(self) -> bool:
        """Whether there is a bound at all; without one nobody sits a step out."""
        return self._limit is not None

    def aside(self, queue: Sequence[Prefill], begun: int) -> frozenset[str]:
        """Keys of the prompts that sit out the next step; at least one prompt of the queue never does.

        Args:
            queue: prompts in the order in which they are served.
            begun: how many of them, from the first on, have had a step.
        """
        if self._limit is None or begun == 0:
            return frozenset()
        yields: list[Prefill] = []
        if self._pause:
            self._pause -= 1
        elif not self._yielded:
            yields = self._longer(queue, begun)
        self._yielded = bool(yields)
        return frozenset(prompt.key for prompt in yields)

    def refused(self) -> None:
        """Nobody could take the step (no room in the KV cache, say): none is given for a while."""
        self._pause = _PAUSE

    def _longer(self, queue: Sequence[Prefill], begun: int) -> list[Prefill]:
        """The prompts that have begun and are longer than the late one that would go next."""
        assert self._limit is not None
        late = [prompt.remaining for prompt in queue[1:] if prompt.waited_s > self._limit]
        if not late:
            return []
        longer = [prompt for prompt in queue[:begun] if prompt.remaining > min(late)]
        first = next(prompt for prompt in queue if prompt not in longer)
        shorter = bool(longer) and first.remaining < min(prompt.remaining for prompt in longer)
        return longer if shorter and first.waited_s > self._limit else []
