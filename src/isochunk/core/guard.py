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
_LATE = 1.25  # measured over predicted TTFT of a finished prompt
_HARM = 1.1  # measured TTFT over what vLLM's own fixed size is predicted to take
_STRIKES = 2
_FIRST_REST = 8  # prompts without a plan after the first step back; doubled each time, halved by a good prompt
_LONGEST_REST = 256


@dataclass(slots=True)
class Guard:
    """Watches steps and finished prompts.

    Steps that take far longer than predicted raise the step cost at once, in mid-prompt: to over-estimate it
    is cheap, to under-estimate it ruinous. Prompts that end later than vLLM's own fixed size would have
    let them, twice in a row, switch planning off for a number of prompts.

    Attributes:
        harmful: finished prompts that came later than vLLM's own fixed size would have brought them.
        resting: prompts left to vLLM before a plan is tried again.
    """

    harmful: int = 0
    resting: int = 0
    _strikes: int = 0
    _rest: int = _FIRST_REST
    _recent: deque[tuple[Floats, float]] = field(default_factory=lambda: deque(maxlen=_WATCHED))

    def step(self, model: CostModel, row: Floats, measured: float) -> CostModel | None:
        """Note a step (features, seconds); returns a model with a raised step cost when an alarm is due."""
        self._recent.append((row, measured))
        if len(self._recent) < _WATCHED:
            return None
        rows, seconds = (np.array(column) for column in zip(*self._recent, strict=True))
        missing = seconds - model.predict(rows)
        if (seconds > _ALARM * model.predict(rows)).sum() < _WATCHED - 1:
            return None
        self._recent.clear()
        return model.with_costs(c0=model.c0 + float(np.median(missing)))

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
