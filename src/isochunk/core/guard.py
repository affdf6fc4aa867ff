"""What to do when a plan did harm. It measures; a formula alone can't promise never to be worse."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from isochunk.core.cost import CostModel

__all__ = ["Guard"]

Floats = npt.NDArray[np.float64]

_WATCHED = 4  # steps over which an alarm is decided: one slow step is noise, four are not
_ALARM = 1.5  # measured over predicted seconds of those steps
_LONGER = 1.4  # predicted seconds over those of the steps that raised the alarm, of steps that decide it
_ENOUGH = 2  # such steps
_PATIENCE = 24  # steps after which an alarm without them is dropped
_MISSING = 0.3  # part of a short step's time that must be step cost beyond the model's
_LATE = 1.25  # measured over predicted TTFT of a finished prompt
_HARM = 1.1  # measured TTFT over what vLLM's own fixed size is predicted to take
_STRIKES = 2
_FIRST_REST = 8  # prompts without a plan after the first step back; doubled each time, halved by a good prompt
_LONGEST_REST = 256


@dataclass(slots=True)
class Guard:
    """Watches steps and finished prompts.

    Steps that take far longer than predicted are either on a slower machine, which changes no plan, or their step cost
    is far higher, which makes small steps ruinous. Longer steps tell which: `doubling` asks for them, in mid-prompt,
    and when they take little longer than the short ones the step cost is raised. Prompts that end later than vLLM's own
    fixed size would have let them, twice in a row, switch planning off for a number of prompts.

    Attributes:
        harmful: finished prompts that came later than vLLM's own fixed size would have brought them.
        resting: prompts left to vLLM before a plan is tried again.
    """

    harmful: int = 0
    resting: int = 0
    _short: tuple[Floats, Floats] | None = None
    _long: list[tuple[Floats, float]] = field(default_factory=list)
    _waited: int = 0
    _slow: float = 1.0
    _strikes: int = 0
    _rest: int = _FIRST_REST
    _recent: deque[tuple[Floats, float]] = field(default_factory=lambda: deque(maxlen=_WATCHED))

    @property
    def doubling(self) -> bool:
        """Whether steps should be longer than planned, to tell a high step cost from a slow machine."""
        return self._short is not None

    def step(self, model: CostModel, row: Floats, measured: float) -> CostModel | None:
        """Note a step (features, seconds); returns a model with a raised step cost when an alarm is due."""
        if self._short is not None:
            return self._decide(model, row, measured)
        self._recent.append((row, measured))
        if len(self._recent) < _WATCHED:
            return None
        rows, seconds = (np.array(column) for column in zip(*self._recent, strict=True))
        if (seconds > _ALARM * self._slow * model.predict(rows)).sum() >= _WATCHED - 1:
            self._short, self._waited = (rows, seconds), 0
            self._long.clear()
            self._recent.clear()
        return None

    def refitted(self, *, proven: bool) -> None:
        """The model follows the machine's speed again; with ``proven`` proportions there is nothing to decide."""
        self._slow = 1.0
        if proven:
            self._short = None
            self._recent.clear()

    def _decide(self, model: CostModel, row: Floats, measured: float) -> CostModel | None:
        assert self._short is not None
        predicted = model.predict(self._short[0])
        short, took = float(np.median(predicted)), float(np.median(self._short[1]))
        length = float(model.predict(row[None])[0])
        if length > _LONGER * short:
            self._long.append((row, measured))
        self._waited += 1
        if len(self._long) < _ENOUGH:
            if self._waited > _PATIENCE:  # no step can be longer: then the step cost is no great part of it
                self._short = None
            return None
        rows, seconds = (np.array(column) for column in zip(*self._long, strict=True))
        slope = max((float(np.median(seconds)) - took) / (float(np.median(model.predict(rows))) - short), 0.0)
        missing = took - slope * short
        self._short = None
        if missing < _MISSING * took:
            self._slow = took / short
            return None
        return model.with_costs(c0=model.c0 + missing)

    def prompt(self, measured: float, predicted: float, fixed: float) -> bool:
        """Note a planned prompt's TTFT in seconds beside its prediction and that of vLLM's fixed size.

        Returns True when planning must rest.
        """
        if measured <= _HARM * fixed or measured <= _LATE * predicted:
            self._strikes = 0
            self._rest = max(self._rest // 2, _FIRST_REST)
            return False
        self.harmful += 1
        self._strikes += 1
        if self._strikes < _STRIKES:
            return False
        self._strikes = 0
        self.resting = self._rest
        self._rest = min(2 * self._rest, _LONGEST_REST)
        return True
