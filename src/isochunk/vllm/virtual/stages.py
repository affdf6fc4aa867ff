"""The virtual stages of one engine: what a step costs on each, and what goes wrong with them."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from isochunk.core.cost import CostModel
from isochunk.vllm.virtual.pace import Span
from isochunk.vllm.virtual.pipeline import Pipeline, Step
from isochunk.vllm.virtual.trouble import Cold, Die, Graphs, Noise, Resume, Slow, Stop, Tiles, Trouble, read

__all__ = ["Stages"]


class Stages:
    """Clocks with costs. All seconds given are the rehearsed machine's; the clocks run ``speed`` times as fast.

    Args:
        models: one cost model a stage.
        decode: cost of decodes, as a profile may have it.
        hand_over: seconds from a stage to the next.
        back: seconds from the last stage to the engine.
        speed: how much faster than the rehearsed machine.
        troubles: what goes wrong; their times count from `begin`.
    """

    def __init__(
        self,
        models: Sequence[CostModel],
        *,
        decode: CostModel | None = None,
        hand_over: float = 0.0,
        back: float = 0.0,
        speed: float = 1.0,
        troubles: Sequence[Trouble] = (),
    ) -> None:
        self.models = tuple(models)
        self._kinds = list(dict.fromkeys(models))
        self._kind = [self._kinds.index(model) for model in models]
        self.decode = decode
        self.speed = speed
        self.pipeline = Pipeline(len(models), hand_over=hand_over / speed, back=back / speed)
        self._noise: Noise | None = None
        self._random = random.Random()
        self._cold = Cold(steps=1, factor=1)
        self._cold_left = 0
        self._tiles = 1
        self._graphs: Graphs | None = None
        self._on_death: Callable[[], None] | None = None
        self._timers: list[threading.Timer] = []
        self._timed = [each for each in troubles if isinstance(each, (Slow, Stop, Die))]
        self._lock = threading.Lock()
        for trouble in troubles:
            if trouble not in self._timed:
                self.meet(trouble)

    def begin(self) -> None:
        """The first request is there: from now on the times of troubles count."""
        timed, self._timed = self._timed, []
        for trouble in timed:
            self.meet(trouble)

    def on_death(self, call: Callable[[], None]) -> None:
        """Whom to call when a worker dies."""
        self._on_death = call

    def enter(self, chunks: Sequence[int], histories: Sequence[int], decodes: Sequence[int] = ()) -> Step:
        """A step with these new tokens of prompts after these histories, and decodes after theirs, enters now."""
        return self.pipeline.enter(self.seconds(chunks, histories, decodes))

    def seconds(self, chunks: Sequence[int], histories: Sequence[int], decodes: Sequence[int] = ()) -> list[float]:
        """Seconds of the clocks that a step takes on each stage."""
        if self.decode is None and decodes:
            chunks, histories, decodes = [*chunks, *[1] * len(decodes)], [*histories, *decodes], ()
        with self._lock:
            total = sum(chunks)
            factor = 1 / self.speed
            if self._graphs is not None and total > self._graphs.tokens:
                factor *= self._graphs.factor
            if self._cold_left > 0:
                self._cold_left -= 1
                factor *= self._cold.factor
            if chunks and total % self._tiles:
                chunks = [*chunks[:-1], chunks[-1] + self._tiles - total % self._tiles]
            seconds = [self._cost(model, chunks, histories, decodes) * factor for model in self._kinds]
            return [seconds[kind] * self._luck() for kind in self._kind]

    def meet(self, trouble: Trouble) -> None:
        """Let this trouble happen; its times count from now."""
        now = time.monotonic()
        match trouble:
            case Noise():
                with self._lock:
                    self._noise, self._random = trouble, random.Random(trouble.seed)
            case Cold():
                with self._lock:
                    self._cold, self._cold_left = trouble, trouble.steps
            case Tiles():
                self._tiles = trouble.tokens
            case Graphs():
                self._graphs = trouble
            case Slow() | Stop():
                rate = 1 / trouble.factor if isinstance(trouble, Slow) else 0.0
                start = now + trouble.at / self.speed
                end = math.inf if trouble.seconds is None else start + trouble.seconds / self.speed
                self.pipeline.slow(Span(start, end, rate), trouble.stage)
            case Die():
                timer = threading.Timer(trouble.at / self.speed, self._die, [trouble.stage])
                timer.daemon = True
                self._timers.append(timer)
                timer.start()
            case Resume():
                self._resume()

    def tell(self, data: dict[str, Any]) -> Trouble:
        """Let the trouble that this plain data names happen.

        Raises:
            ConfigError: it names none.
        """
        trouble = read(data, stages=len(self.models))
        self.meet(trouble)
        return trouble

    def close(self) -> None:
        """Nothing more happens, and who waits is told so."""
        for timer in self._timers:
            timer.cancel()
        self.pipeline.die("the virtual stages are shut down")

    def as_dict(self) -> dict[str, Any]:
        """Plain data for the route."""
        quiet = replace(self._noise, seed=0) if self._noise else None
        return {
            "stages": len(self.models),
            "speed": self.speed,
            "models": [model.as_dict() for model in self._kinds],
            "rates": self.pipeline.rates(),
            "noise": quiet.as_dict() if quiet else None,
            "cold_steps": self._cold_left,
            "tiles": self._tiles,
            "graphs": self._graphs.as_dict() if self._graphs else None,
            "dead": self.pipeline.dead,
        }

    def _cost(self, model: CostModel, chunks: Sequence[int], histories: Sequence[int], decodes: Sequence[int]) -> float:
        if self.decode is None or not decodes:
            return model.step(chunks, histories)
        if not chunks:
            return self.decode.step([1] * len(decodes), decodes)
        return model.step(chunks, histories) + sum(float(self.decode.marginal(1, history)) for history in decodes)

    def _resume(self) -> None:
        with self._lock:
            self._noise, self._cold_left, self._tiles, self._graphs, self._timed = None, 0, 1, None, []
        for timer in self._timers:
            timer.cancel()
        self.pipeline.resume()

    def _die(self, stage: int) -> None:
        self.pipeline.die(f"the worker of virtual stage {stage} died, as was asked for")
        if self._on_death is not None:
            self._on_death()

    def _luck(self) -> float:
        noise = self._noise
        if noise is None:
            return 1.0
        factor = self._random.lognormvariate(0.0, noise.sigma)
        return factor * noise.tail if noise.tails and self._random.random() < noise.tails else factor
