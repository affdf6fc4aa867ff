"""What decides the chunks of a step: the planner that serves, or a published rule on equal terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from isochunk.core.cost import CostModel
from isochunk.core.errors import PlanError
from isochunk.core.planner import POLICIES as PLANNER_POLICIES
from isochunk.core.steps import Prefill, StepPlanner
from isochunk.core.turns import Turns, rank
from isochunk.simulator.share import ChunkPolicy, Chunks, Share

if TYPE_CHECKING:
    from isochunk.simulator.deployment import Deployment
    from isochunk.simulator.scheduler import Queue, Steps

__all__ = ["POLICIES", "PlannerPolicy", "make_policy"]

POLICIES = (*PLANNER_POLICIES, "ascend", "ascend_online")


class PlannerPolicy(ChunkPolicy):
    """The same `StepPlanner` that vLLM's scheduler asks.

    Args:
        own: leave the steps to vLLM.
        longest_wait: serve those with the least work first, but nobody after more than so many seconds; None for
            first come, first served.
    """

    def __init__(
        self,
        planner: StepPlanner,
        model: CostModel,
        turns: Turns,
        *,
        own: bool = False,
        longest_wait: float | None = None,
    ) -> None:
        self.reorders = longest_wait is not None
        self._longest_wait = longest_wait or 0.0
        self.planner = planner
        self._own = own
        self._model = model
        self._turns = turns

    def share(self, queue: Queue, in_flight: Steps, now: float) -> Share:
        """Ask whose turn it is, and how many tokens the step should hold."""
        shown = queue.prefills
        aside = self._turns.aside(shown, queue.begun)
        if aside:
            shown = [prompt for prompt in shown if prompt.key not in aside]
        if self._own:
            share = Share()
            share.aside = aside
            return share
        tokens = self.planner.tokens(
            self._model,
            shown,
            more=queue.more,
            other_seconds=sum(self._model.marginal(1, history) for history in queue.decodes),
            in_flight=[step.seconds for step in in_flight if step.prefills],
            between=bool(aside),
        )
        return Chunks(shown, min(tokens, self.planner.max_chunk - len(queue.decodes)), aside)

    def ranks(self, waiting: Sequence[Prefill]) -> list[tuple[float, float]]:
        """By predicted work, but for those who have waited too long."""
        return [rank(self._model, prompt, self._longest_wait) for prompt in waiting]

    def refused(self) -> None:
        """No turns for a while."""
        self._turns.refused()


def make_policy(
    name: str,
    deployment: Deployment,
    *,
    chunk: int | None = None,
    smooth: float = 1.0,
    min_chunk: int | None = None,
    max_queue_delay: float | None = None,
    least_work_first: float | None = None,
    online_rows: Sequence[int] = (5, 30),
) -> ChunkPolicy:
    """A fresh policy for one instance.

    Args:
        name: one of `POLICIES`.
        chunk: the fixed size, or the first chunk of the published rules; the token budget when None.
        smooth: trust in the plan, from 0 to 1.
        min_chunk: floor of a chunk; one block for the planner, 4096 for the published Ascend rules.
        max_queue_delay: seconds that a prompt waits before it may go between a longer one's steps (`Turns`).
        least_work_first: seconds after which nobody passes a prompt by having less work (`turns.rank`).
        online_rows: timed batches before the Ascend rule's own fit is used, and after which it is frozen.
    """
    size = deployment.max_tokens if chunk is None else chunk
    if not 1 <= size <= deployment.max_tokens:
        raise PlanError(f"chunk = {size} must be from 1 to max_num_batched_tokens = {deployment.max_tokens}")
    model = deployment.slowest
    for option, value in (("max_queue_delay", max_queue_delay), ("least_work_first", least_work_first)):
        if value is not None and name.startswith("ascend"):
            raise PlanError(f"{option} = {value}: policy {name} serves in order; leave it out")
        if value is not None and not value >= 0:
            raise PlanError(f"{option} = {value} must be at least 0 seconds")
    if name in ("ascend", "ascend_online"):
        from isochunk.simulator.ascend import AscendPolicy

        return AscendPolicy(
            model,
            base=size,
            budget=deployment.max_tokens,
            smooth=smooth,
            min_chunk=4096 if min_chunk is None else min_chunk,
            block=deployment.block,
            online_rows=online_rows if name == "ascend_online" else None,
        )
    planner = StepPlanner(
        stages=deployment.stages,
        max_chunk=deployment.max_tokens,
        block=deployment.block,
        min_chunk=min_chunk or deployment.block,
        smooth=smooth,
        stage_models=() if deployment.models.count(model) == deployment.stages else deployment.models,
    )
    for known in PLANNER_POLICIES:
        if name == known:
            planner.use(known, size)
            own = name == "fixed" and chunk is None
            return PlannerPolicy(planner, model, Turns(max_queue_delay), own=own, longest_wait=least_work_first)
    raise PlanError(f"policy = {name!r} must be one of {', '.join(POLICIES)}")
