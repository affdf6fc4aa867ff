"""The start-up probe: what a prefill step costs, measured through the engine's front door."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from isochunk.core.cost import CostModel
from isochunk.core.errors import FitError, ModelError
from isochunk.core.fit import Fit, fit
from isochunk.core.planner import plan

__all__ = ["PREFIX", "Probe", "Steps", "few_sizes", "many_sizes", "probe_chunks", "sizes_between", "wanted_sizes"]

logger = logging.getLogger("vllm.isochunk.probe")

Steps = Sequence[tuple[int, int, float]]  # chunk, history and seconds of each step

PREFIX = "isochunk-probe-"
_MOST_STEPS = 65  # while nothing but the straight line is found
_MOST_LARGE = 11  # large chunks that carry the history on, few enough that the prompt is sent twice
# One prompt visits small and large chunks at small, middle and large history. Exponents of the ratio
# between the smallest chunk and the others; the rest of the prompt is one more chunk.
_GROUPS = ((0, 0, 1, 1, 2, 2, 2.5, 3), (0, 0, 1, 1, 2, 2, 2.5), (0, 0, 1, 1, 2))
_SMALLEST = 64
_SHORTEST = 120  # a prompt is at least so many times its smallest chunk, to leave room for larger ones
_BUSY = 0.5  # how far apart the same step's times are, in parts, when something else was running
_TOGETHER = 6  # prompts of one step that are sent together, so that they follow each other through the stages
_AHEAD = 4  # times the longest step measured, of which it can be foretold whether it fits
_FEW = (16, 64, 128, 256, 512, 768, 1024, 2048, 3072, 4096)
_MANY = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512)
_OCTAVE = 8  # sizes between one of _MANY's and its double, from the last on
_SIZES_SHARE = 0.4  # of the time, most that is spent on sizes before histories are tried
_MANY_SHARE, _WANTED_SHARE = 0.5, 0.7  # until when many sizes are tried, and those that plans would take
_JUMP = 0.02  # a step between two sizes that is so much longer than its tokens explain is a jump somewhere between
_COMPOSITE_SHARE = 0.5  # of the time left, most that a composite prompt is foretold to take
_WANTED = tuple(int(1024 * 2 ** (half / 2)) for half in range(9))
_MOST_WANTED, _WANTED_ROUNDS = 48, 4
_TELL_S = 5.0
_TOO_NOISY = 0.1  # how far apart the same step's times may be, in parts, for a curve to be looked for
_TOLD = 0.5  # pairs of tokens, of the longest step without history, from which on history tells what it costs
_WARY = 1.25  # how much longer than foretold a step with history may be


def few_sizes(limit: int, tokens: int, block: int) -> list[int]:
    """Sizes of a step that tell whether its cost is a straight line; a prompt has at most ``tokens``."""
    return _blocks(_FEW, min(limit, tokens), block)


def many_sizes(limit: int, tokens: int, block: int) -> list[int]:
    """Sizes of a step that tell its cost's floor, tiles and graphs, up to the limit."""
    most = min(limit, tokens)
    sizes = list(_MANY)
    while sizes[-1] < most:
        base = sizes[-1]
        sizes += [base + base * part // _OCTAVE for part in range(1, _OCTAVE + 1)]
    return _blocks([*sizes, most], most, block)


def sizes_between(steps: Steps, block: int) -> list[int]:
    """Where to look closer: just above a size after which there is a jump, or halfway when that has been tried."""
    measured = {chunk: seconds for chunk, history, seconds in sorted(steps) if history == 0}
    if len(measured) < 2:
        return []
    sizes = list(measured)
    half = float(np.interp(sizes[-1] / 2, sizes, list(measured.values())))
    token = max(measured[sizes[-1]] - half, 0.0) / (sizes[-1] / 2)
    found = []
    for low, high in pairwise(sizes):
        risen = measured[high] - measured[low] - token * (high - low)
        if low >= _SMALLEST and high - low > block and risen > _JUMP * measured[low]:
            near = low + block
            tried = any(size < low and low - size <= block for size in sizes)
            found.append(near if not tried else (low + high) // 2 // block * block)
    return sorted(size for size in set(found) if size not in measured)


def wanted_sizes(model: CostModel, stages: int, limit: int, tokens: int, block: int) -> list[int]:
    """Sizes of steps in plans for prompts of up to some thousand of ``tokens``, which have few steps.

    Between sizes that were measured a plan ends where the model is most in error, so it is there that it is to be
    looked at; long prompts have steps of many sizes, whose errors are small beside all of them.
    """
    sizes: set[int] = set()
    for length in (length for length in _WANTED if length <= tokens):
        chunks = plan(model, length, stages, max_chunk=limit, block=block).chunks
        sizes.update(min(-(-chunk // block) * block, limit) for chunk in chunks)
        if len(sizes) > _MOST_WANTED:
            break
    return sorted(sizes)


def _blocks(sizes: Sequence[int], most: int, block: int) -> list[int]:
    whole = {max(size // block, 1) * block for size in sizes}
    return sorted(size for size in whole if size <= most)


def probe_chunks(tokens: int, max_chunk: int, block: int) -> list[int]:
    """Chunk sizes of one composite probe prompt of up to ``tokens`` tokens, at most ``max_chunk`` each."""
    small = min(max(min(_SMALLEST, tokens // _SHORTEST) // block, 1) * block, max_chunk)

    def groups(ratio: float) -> list[list[int]]:
        return [[_size(small, ratio**power, max_chunk, block) for power in group] for group in _GROUPS]

    low, high = 1.0, max(max_chunk / small, 1.0) ** (1 / max(_GROUPS[0]))
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(map(sum, groups(middle))) > 0.94 * tokens else (middle, high)
    first, second, third = groups(low)
    rest = tokens - sum(first) - sum(second) - sum(third)
    large = [max_chunk] * min(max(rest - max_chunk, 0) // max_chunk, _MOST_LARGE)
    half = len(large) // 2
    chunks: list[int] = []
    for size in [*first, *large[:half], *second, *large[half:], *third, min(max(rest, 1), max_chunk)]:
        chunks.append(min(size, tokens - sum(chunks)))
        if sum(chunks) == tokens:
            break
    return chunks


def _typical(seconds: list[float]) -> float:
    """The middle of three repeats, the less of two.

    Noise makes a step longer, but where an exit is noticed late it makes the step after look shorter: the
    least of three would keep just those.
    """
    return sorted(seconds)[(len(seconds) - 1) // 2]


def _size(small: int, factor: float, max_chunk: int, block: int) -> int:
    return min(max(int(small * factor) // block * block, small), max_chunk)


@dataclass(slots=True, kw_only=True)
class Probe:
    """Finds what a step costs: sizes without history first, then one prompt of small and large chunks at all histories.

    A few sizes and that prompt, sent twice, do for a straight line. Where they show another shape, many sizes follow,
    with those next to each jump and those that plans would take, and then the repeats. What typical repeats took is
    fitted.

    Attributes:
        chunks: sizes of the composite prompt's steps.
        max_chunk: most tokens of a step; ``block`` is what sizes are multiples of.
        stages: pipeline stages.
        max_seconds: no step is begun that is foretold to end later than this.
    """

    chunks: list[int]
    max_chunk: int
    block: int
    stages: int
    max_seconds: float
    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    busy: bool = False
    over: bool = False
    samples: Steps = ()
    _times: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    _sent: dict[str, list[int]] = field(default_factory=dict)
    _live: Steps = ()
    _handed: dict[tuple[str, int], float] = field(default_factory=dict)  # foretold seconds of the steps begun
    _start: float = 0.0
    _deadline: float = 0.0
    _told: float = 0.0
    _number: int = 0

    def chunk_at(self, key: str, history: int, so_far: Steps = ()) -> int | None:
        """The chunk that a prompt of the probe takes after ``history`` tokens; ``so_far`` are its steps that came out.

        A step that would not end in time is not begun: the probe is `over`, and what is returned is the least step.
        """
        self._live = so_far
        if self.over:
            return self.block
        at = 0
        for size in self._sent.get(key, []):
            if at == history:
                if (key, history) in self._handed or self._fits(key, size, history):
                    return size
                self.over = True
                return self.block
            at += size
        return None

    def _fits(self, key: str, size: int, history: int) -> bool:
        seconds = self._foretold(size, history)
        before = sum(list(self._handed.values())[-self.stages :])
        if time.monotonic() + before + self.stages * seconds > self._deadline:
            return False
        self._handed[key, history] = seconds
        return True

    def _foretold(self, size: int, history: int) -> float:
        """Seconds on a stage that a step may take, by those measured; 0 while there are none.

        Without history nothing grows faster than with the square of the chunk, and attention takes no more than all
        of a step; with history it is what it was in the steps that had most of it.
        """
        known = {chunk: min(times) for (chunk, at), times in self._times.items() if at == 0}
        if not known:
            return 0.0
        above = [chunk for chunk in known if chunk >= size]
        near = min(above) if above else max(known)
        first = known[near] * max(size / near, 1.0) ** 2
        if not history:
            return first
        late = [(c, h, min(times)) for (c, h), times in self._times.items() if h]
        late += [step for step in self._live if step[1]]
        most = max((c * h for c, h, _ in late), default=0)
        pair = min(2 * seconds / chunk**2 for chunk, seconds in known.items())
        if most >= _TOLD * max(known) ** 2:
            pair = max(self._extra(known, *step) for step in late if step[0] * step[1] >= most / 4)
        return first + _WARY * pair * size * history

    @staticmethod
    def _extra(known: dict[int, float], chunk: int, history: int, seconds: float) -> float:
        """Seconds a pair of a new and a history token."""
        less = max((size for size in known if size <= chunk), default=min(known))
        return max(seconds - known[less], 0.0) / (chunk * history)

    def run(self, send: Callable[[dict[str, list[int]]], Steps]) -> Fit | None:
        """Measure and fit; None when the steps measured give no model.

        ``send(prompts)`` sends prompts, each with the chunks that it is to be cut into, through the engine; it asks
        `chunk_at` for each step, gives up what is in flight once the probe is `over`, and returns the steps.
        """
        start = self._start = time.monotonic()
        self._deadline = start + _SIZES_SHARE * self.max_seconds
        longest = sum(self.chunks)
        self._sizes(send, few_sizes(self.max_chunk, longest, self.block))
        if self._times and time.monotonic() < self._deadline:  # what was feared may fit, by what is known now
            self._deadline, self.over = start + self.max_seconds / 2, False
            self._sizes(send, few_sizes(self.max_chunk, longest, self.block))
        self._deadline, self.over = start + self.max_seconds, False
        self._composite(send)
        if self._curve_found():
            self._sizes(send, few_sizes(self.max_chunk, longest, self.block), again=True)
        if not self._shows_a_curve():
            self._composite(send)
            if self._shows_a_curve():
                self._sizes(send, few_sizes(self.max_chunk, longest, self.block), again=True)
        if self._shows_a_curve():
            self._deadline, self.over = start + _MANY_SHARE * self.max_seconds, False
            self._sizes(send, many_sizes(self.max_chunk, longest, self.block))
            for _ in range(2):
                self._sizes(send, sizes_between(self._typical(), self.block))
            self._deadline, self.over = start + _WANTED_SHARE * self.max_seconds, False
            for _ in range(_WANTED_ROUNDS):
                self._sizes(send, self._wanted(longest))
            self._deadline, self.over = start + self.max_seconds, False
            self._composite(send)
            self._sizes(send, sorted(chunk for chunk, at in self._times if at == 0), again=True)
            self._composite(send)
        elif self.steps + len(self.chunks) <= _MOST_STEPS:
            self._composite(send)
        self.seconds = time.monotonic() - start
        self.samples = self._typical()
        self.busy = (self._noisy() or 0.0) > _BUSY
        return self._fit(say=True)

    def _shows_a_curve(self) -> bool:
        return self._noisy() is not None and self._curve_found()

    def _curve_found(self) -> bool:
        found = self._fit()
        return found is not None and found.model.curve is not None

    def _wanted(self, longest: int) -> list[int]:
        """Sizes that plans by what is known so far would take, and that were not measured."""
        found = self._fit()
        return [] if found is None else wanted_sizes(found.model, self.stages, self.max_chunk, longest, self.block)

    def _composite(self, send: Callable[[dict[str, list[int]]], Steps]) -> None:
        if not self.over:
            self._send(send, [self._fitting()])

    def _fitting(self) -> list[int]:
        """The composite prompt, or as long a one as is foretold to take no more than its part of the time left.

        The more is known the less is feared, so the next one may be longer. One that is too long would be given up
        with a pipeline full of steps, of which none tells anything.
        """
        left = _COMPOSITE_SHARE * (self._deadline - time.monotonic())
        chunks, tokens = self.chunks, sum(self.chunks)
        while self._together(chunks) > left and tokens > _SHORTEST * self.block:
            tokens = tokens * 2 // 3
            chunks = probe_chunks(tokens, self.max_chunk, self.block)
        return chunks

    def _together(self, chunks: Sequence[int]) -> float:
        """Seconds that a prompt of these chunks is foretold to take through all stages."""
        seconds = [self._foretold(size, sum(chunks[:at])) for at, size in enumerate(chunks)]
        return sum(seconds) + (self.stages - 1) * max(seconds)

    def _sizes(self, send: Callable[[dict[str, list[int]]], Steps], sizes: list[int], *, again: bool = False) -> None:
        new = [size for size in sizes if again or (size, 0) not in self._times]
        while new and not self.over:
            known = max((size for size, at in self._times if at == 0), default=0)
            together = [size for size in new[:_TOGETHER] if size <= _AHEAD * known] or new[:1]
            self._send(send, [[size] for size in together])
            new = new[len(together) :]

    def _send(self, send: Callable[[dict[str, list[int]]], Steps], prompts: list[list[int]]) -> None:
        self._sent = {}
        for chunks in prompts:
            self._sent[f"{PREFIX}{self._number}"] = chunks
            self._number += 1
        self._handed.clear()
        self._live = ()
        steps = send(self._sent)
        self.steps += len(steps)
        self.tokens += sum(chunk for chunk, _, _ in steps)
        planned = {(size, sum(chunks[:at])) for chunks in prompts for at, size in enumerate(chunks)}
        for chunk, history, seconds in steps:
            if (chunk, history) in planned and seconds > 0:
                self._times.setdefault((chunk, history), []).append(seconds)

    def _typical(self) -> Steps:
        return [(chunk, history, _typical(seconds)) for (chunk, history), seconds in self._times.items()]

    def _noisy(self) -> float | None:
        """How far apart the same step's times are, in parts, at the median; None when nothing was repeated."""
        apart = [sorted(times)[1] / min(times) - 1 for times in self._times.values() if len(times) > 1]
        return float(np.median(apart)) if apart else None

    def _fit(self, *, say: bool = False) -> Fit | None:
        try:
            samples = self._typical()
            chunk, history, seconds = zip(*samples, strict=True) if samples else ((), (), ())
            noise = self._noisy()
            result = fit(chunk, history, seconds, noise=noise if noise is None or noise < _TOO_NOISY else math.inf)
            if result.undetermined:
                raise FitError(f"its steps don't determine {', '.join(result.undetermined)}")
            return result
        except (FitError, ModelError) as error:
            if say:
                logger.warning("isochunk: the probe gave no cost model (%s); vLLM's own chunks are used", error)
            return None

    @property
    def begun(self) -> int:
        """Steps of this round that were begun."""
        return len(self._handed)

    def time_to_tell(self) -> bool:
        """Whether it is some seconds since this was last true."""
        now = time.monotonic()
        due = now - (self._told or self._start) > _TELL_S
        if due:
            self._told = now
        return due

    def progress(self) -> str:
        """How far it is."""
        gone = time.monotonic() - self._start
        now = f"{len(self._handed)} of {sum(map(len, self._sent.values()))} steps of this round"
        return f"{self.steps} steps done, {now}, {gone:.0f} s of at most {self.max_seconds:.0f} s"

    def as_dict(self) -> dict[str, Any]:
        """Plain data for the status endpoint."""
        return {
            "seconds": self.seconds,
            "steps": self.steps,
            "tokens": self.tokens,
            "busy": self.busy,
            "samples": [list(sample) for sample in self.samples],
        }
