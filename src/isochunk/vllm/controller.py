"""The run-time state between vLLM's scheduler and the core. It imports no vLLM, so tests drive it directly."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from isochunk.core.calibrator import Calibrator
from isochunk.core.cost import CostModel, features
from isochunk.core.fit import MIN_SAMPLES, MIN_WITH_PRIOR, Fit
from isochunk.core.guard import Guard
from isochunk.core.planner import Policy, plan, static_ttft
from isochunk.core.steps import Prefill, StepPlanner
from isochunk.core.timing import StageClock
from isochunk.vllm.config import ChunkConfig
from isochunk.vllm.probe import PREFIX
from isochunk.vllm.prompts import Part, PromptLog, PromptRecord, Run, Step
from isochunk.vllm.tally import Tally

__all__ = ["Controller", "Counters"]

_REFIT_PAUSE_S = 1.0
_MOST_IN_FLIGHT = 8  # steps a stage; a pipeline holds one or two
_DECODES = 0.2  # part of a step's predicted seconds that decodes may take of one that teaches


@dataclass(slots=True)
class Counters:
    """Counts since the start of the server."""

    steps: int = 0
    planned: int = 0
    fallbacks: int = 0
    harmful: int = 0
    yields: int = 0
    refits: int = 0
    alarms: int = 0
    rejected: int = 0


class Controller:
    """Chooses each step's token budget, times the steps, and keeps the model true.

    Args:
        config: the plugin's configuration.
        planner: the step planner, whose policy can be switched at run time.
        stages: pipeline stages.

    Attributes:
        drift: typical measured over predicted seconds of the steps that the last attempt to refit looked at.
        tally: sums and histograms of all steps and prompts.
        ended: prompts that had their first token in the last step that came out.
        due: whether prompts have ended since `refit_due` was asked.
    """

    def __init__(self, config: ChunkConfig, planner: StepPlanner, stages: int) -> None:
        self.config = config
        self.planner = planner
        self.chunk: int | None = None
        self.source: str | None = None
        self.counters = Counters()
        self.drift = 1.0
        self.log = PromptLog()
        self.tally = Tally()
        self.ended: list[PromptRecord] = []
        self._model_since = time.monotonic()
        self._target_s: float | None = None
        self._guard = Guard()
        self._calibrator = Calibrator(None, config.max_fit_chunk)
        self._cold = stages
        self._clock = StageClock(stages)
        self._deepest = stages  # most steps that were in the pipeline at once
        self._in_flight: deque[Step] = deque(maxlen=_MOST_IN_FLIGHT * stages)  # nobody may tell that they came out
        self._last_refit = 0.0
        self._new_samples = 0
        self.due = False
        planner.use(config.policy)

    def use_policy(self, policy: Policy, chunk: int | None) -> None:
        """Switch policy and fixed size.

        Raises:
            PlanError: the size is out of range or the policy unknown.
        """
        self.planner.use(policy, chunk)
        self.chunk = chunk

    @property
    def model(self) -> CostModel | None:
        """What steps cost now; None while nothing is known."""
        return self._calibrator.model

    @property
    def floors(self) -> tuple[float, float]:
        """Least c0 and c3 that refits may reach."""
        return self._calibrator.floors

    def use_model(
        self,
        model: CostModel | None,
        source: str | None,
        floors: tuple[float, float] | None = None,
    ) -> None:
        """Plan with this measured model from now on, and refit it no lower than the floors; None plans nothing."""
        self._calibrator = Calibrator(model, self.config.max_fit_chunk, floors)
        self._changed(source)

    def _changed(self, source: str | None) -> None:
        self.source = source
        self._model_since = time.monotonic()
        self.planner.forget()

    def tokens(
        self,
        queue: Sequence[Prefill],
        more: int,
        beside: Sequence[tuple[int, int]],
        *,
        between: bool = False,
        max_seconds: float = math.inf,
    ) -> int | None:
        """Prefill tokens of the next step; None leaves the step to vLLM.

        Args:
            queue: prompts in vLLM's order.
            more: prompts behind those.
            beside: (new tokens, history) of whoever else is in the step: decodes, prompts that vLLM lets through.
            between: a longer prompt sits this step out.
            max_seconds: most that the step may take, for streams that decode meanwhile. It holds whenever the model is
                known, also for the fixed size and for a prompt that is left to vLLM.
        """
        model = self.model
        fixed = self.planner.policy == "fixed"
        if model is None or (max_seconds == math.inf and (fixed or not self.planning)):
            return self.chunk if fixed else None
        other = _seconds_beside(model, beside)
        if not fixed and not self.planning:
            return min(self.planner.within(model, queue, max_seconds - other), self.planner.max_chunk)
        if len(queue) > 1 or more:
            self.log.share(queue[0].key)  # its steps are cut for all that wait
        in_flight = [step.predicted_s for step in self._in_flight if step.parts]
        tokens = self.planner.tokens(
            model,
            queue,
            more=more,
            other_seconds=other,
            in_flight=in_flight,
            between=between,
            max_seconds=max_seconds,
        )
        return min(2 * tokens, self.planner.max_chunk) if self._guard.doubling and max_seconds == math.inf else tokens

    def within(self, latency: float) -> float:
        """Most seconds of the next step so that it comes out within ``latency`` seconds, and those behind it too.

        A token that has just come waits for the step that it goes into: for those ahead of it in the pipeline, and for
        its own way. With as many steps under way as the engine allows, none may take more than its part.
        """
        now = time.monotonic()
        clock = self._clock.copy()
        for step in self._in_flight:
            clock.foretell(step.entered_s, step.predicted_s)
        return min(latency / self._deepest, clock.most(now, now + latency))

    def fits(self, beside: Sequence[tuple[int, int]], max_seconds: float) -> bool:
        """Whether a step of these (new tokens, history) takes no longer, as far as is known."""
        if max_seconds == math.inf or self.model is None:
            return True
        return self.model.c0 + _seconds_beside(self.model, beside) <= max_seconds

    def yielded(self, request_ids: Collection[str]) -> None:
        """These prompts sit the next step out."""
        self.counters.yields += 1
        for request_id in request_ids:
            self.log.share(request_id)

    def paused(self) -> None:
        """The engine pauses or goes on: what prompts take meanwhile is nobody's doing."""
        self.log.share_all()

    def gone(self, request_ids: Iterable[str]) -> None:
        """The runs of these requests are over: they ended, or were preempted."""
        for request_id in request_ids:
            self.planner.gone(request_id)
            if not request_id.startswith(PREFIX):  # a probe that is given up asks for the steps that came out
                self.log.drop(request_id)

    def entered(self, parts: list[Part], decodes: Sequence[tuple[int, int]], now: float, output: Any) -> None:
        """A step with these parts and decodes went into the pipeline; ``output`` tells it from others."""
        predicted = 0.0
        if self.model is not None:
            shares = [(part.chunk, part.history) for part in parts] + list(decodes)
            predicted = self.model.step(*zip(*shares, strict=True)) if shares else self.model.c0
        runs = [self.log.enter(part) or self._open(part) for part in parts]
        step = Step(output=output, parts=parts, runs=runs, decodes=list(decodes), predicted_s=predicted, entered_s=now)
        self._in_flight.append(step)
        self.counters.steps += 1

    def _open(self, part: Part) -> Run:
        """A prompt's first step: note what it is predicted to take."""
        resting = self.resting > 0
        planned = None if resting else self.planner.planned(part.request_id)
        policy = "fixed" if resting else self.planner.policy
        if resting:
            self._guard.resting -= 1
        elif planned:
            self.counters.planned += 1
            self._target_s = planned.target_s
        record = PromptRecord(
            request_id=part.request_id,
            policy=policy,
            chunk=self.chunk,
            cached=part.history,
            predicted_ttft_s=planned.ttft_s if planned else self._predicted(part, policy),
        )
        return self.log.open(record, part)

    def _predicted(self, part: Part, policy: Policy) -> float | None:
        """TTFT of a prompt alone under a policy that keeps no plan."""
        if self.model is None or policy == "optimal":
            return None
        size = self.planner.fixed_chunk
        return plan(
            self.model, part.prompt, self.planner.stages, cached=part.history, max_chunk=size, policy=policy
        ).ttft_s

    def exited(self, now: float, output: Any, *, learn: bool = True, later: bool = False) -> Fit | None:
        """A step came out of the pipeline; returns the refit that this brought, if any.

        Steps before it whose result never came are dropped. With ``learn`` off the step is timed and logged,
        but neither calibrator nor guard see it. With ``later`` a refit waits for `refit_due`.
        """
        self.ended = []
        if all(step.output is not output for step in self._in_flight):
            return None
        while (step := self._in_flight.popleft()).output is not output:
            pass
        self._deepest = max(self._deepest, 1 + len(self._in_flight))
        seconds = self._clock.step(step.entered_s, now)
        noted = [self.log.step(run, part, step, now, seconds) for run, part in zip(step.runs, step.parts, strict=True)]
        self.ended = finished = [record for record in noted if record is not None]
        if not learn:
            return None
        chunks = [part.chunk for part in step.parts]
        self.tally.step(step.entered_s, now, seconds, step.predicted_s, chunks)
        if self._cold:  # the first steps of a process meet compilation and first-use warm-up
            self._cold -= 1
        elif step.parts and self._mostly_prefill(step):
            self._learn(step, seconds)
        self.due = self.due or bool(finished)
        refit = None if later else self.refit_due(now)
        for record in finished:
            self._judge(record)
        return refit

    def _mostly_prefill(self, step: Step) -> bool:
        """Whether decodes add little to the step: the law was not measured on them."""
        if not step.decodes or self.model is None:
            return not step.decodes
        return _seconds_beside(self.model, step.decodes) <= _DECODES * step.predicted_s

    def _learn(self, step: Step, seconds: float) -> None:
        """Give a clean step to the guard and the calibrator."""
        guarded = self.model is not None and self.planner.policy == "optimal"
        if not guarded and not self.config.need_timing:
            return
        shares = [*((part.chunk, part.history) for part in step.parts), *step.decodes]
        row = features([new for new, _ in shares], [history for _, history in shares], self.model)
        if self.config.need_timing:
            self._calibrator.add(row, seconds, step.runs[0])  # ids are used again
            self._new_samples += 1
        if self.model is None or not guarded:
            return
        raised = None if self._calibrator.proven else self._guard.step(self.model, row, seconds)
        if raised is not None:
            self.counters.alarms += 1
            self._calibrator.alarm(raised)
            self._changed("guard")

    def refit_due(self, now: float) -> Fit | None:
        """Refit when prompts have ended, enough new steps were measured and the last refit is not too recent."""
        due, self.due = self.due, False
        enough = self._new_samples >= (MIN_SAMPLES if self.model is None else MIN_WITH_PRIOR)
        if not due or not self.config.need_timing or not enough or now - self._last_refit < _REFIT_PAUSE_S:
            return None
        self._last_refit = now
        self._new_samples = 0
        self.drift = self._calibrator.drift()
        refit = self._calibrator.refit()
        self._guard.refitted(proven=self._calibrator.proven)
        self.planner.vary(self._calibrator.doubted)
        if refit is not None:
            self.counters.refits += 1
            self._changed("traffic")
        else:
            self.counters.rejected += 1
        return refit

    def _judge(self, record: PromptRecord) -> None:
        """Let the guard compare a planned prompt that ran alone with its prediction and with vLLM's own size."""
        fixed = None
        if self.model is not None and record.policy == "optimal" and record.predicted_ttft_s and record.alone:
            limit = [self.planner.max_chunk]
            fixed = float(static_ttft(self.model, record.cached, record.tokens, limit, self.planner.stages)[0])
            self._guard.prompt(record.measured_ttft_s, record.predicted_ttft_s, fixed)
            self.counters.harmful = self._guard.harmful
        self.tally.prompt(record.tokens, record.measured_ttft_s, record.predicted_ttft_s, fixed)

    @property
    def planning(self) -> bool:
        """Whether the cost model decides the next step."""
        return self.planner.policy != "fixed" and self.model is not None and not self.resting

    @property
    def resting(self) -> int:
        """Prompts left to vLLM before a plan is tried again; 0 in normal service."""
        return self._guard.resting if self.planner.policy == "optimal" else 0

    def as_dict(self, *, prompts: bool = True) -> dict[str, Any]:
        """Plain data for the status endpoint; without the last prompts where only sums are asked for."""
        return {
            "policy": self.planner.policy,
            "chunk": self.chunk,
            "stages": self.planner.stages,
            "max_num_batched_tokens": self.planner.max_chunk,
            "alignment": self.planner.block,
            "model": self.model.as_dict() if self.model else None,
            "source": self.source,
            "need_timing": self.config.need_timing,
            "drift": self.drift,
            "resting": self.resting,
            "in_flight": len(self._in_flight),
            "target_s": self._target_s,
            "model_age_s": time.monotonic() - self._model_since if self.model else None,
            "counters": asdict(self.counters),
            "totals": self.tally.as_dict(),
            **({"prompts": self.log.as_list()} if prompts else {}),
        }


def _seconds_beside(model: CostModel, shares: Iterable[tuple[int, int]]) -> float:
    """Seconds that these (new tokens, history) add to a step which runs anyway."""
    if model.bend is not None:
        return sum(model.marginal(new, history) for new, history in shares)
    tokens = pairs = read = 0.0
    for new, history in shares:
        tokens += new
        pairs += new * (history + new / 2)
        read += history
    return model.c1 * tokens + model.c2 * pairs + model.c3 * read
