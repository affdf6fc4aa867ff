"""What the demo does on this machine, so that it ends in six minutes on any: dtype, lengths, rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isochunk.cli.machine import Dtype, Machine
from isochunk.core.cost import CostModel
from isochunk.core.planner import Policy, plan

__all__ = ["POLICIES", "STAGES", "DemoPlan", "choose", "fitting", "time_left"]

STAGES = 2
POLICIES: tuple[Policy, ...] = ("fixed", "first_chunk", "optimal")

_LADDERS = ((1024, 4096, 8192), (1024, 2048, 4096), (512, 1024, 2048), (256, 512, 1024), (128, 256, 512))
_FEWEST, _MOST = 3, 8
_WHOLE_S = 330.0  # of the six minutes; the rest is for the answer, the report and stopping the server
_COMPARISON_S = 150.0
_PROBE_S = 60.0
_START_S = 45.0  # vLLM's imports, loading and compiling on a machine that is not slow
# A stage's time a token, attention and all the small layers included, over that of its linear layers alone; and how
# many times the prompt's own work a round of three policies takes: two go through both stages one after the other.
_REST, _ROUND = 2.0, 5.2
_SLOW_TOKEN_S = 4e-4  # from here on compiling costs more of the demo than it brings


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """What the demo will do.

    Attributes:
        dtype: of the model.
        lengths: tokens of the prompts; the longest is also the most that a step may hold.
        compiled: whether vLLM compiles the model first.
        probe_s: bound of the start-up probe, seconds.
        start_s: seconds until vLLM answers without the probe, a guess.
        comparison_s: seconds of the comparison, a guess.
    """

    dtype: Dtype
    lengths: tuple[int, ...]
    compiled: bool
    probe_s: float
    start_s: float
    comparison_s: float

    @property
    def shortened(self) -> bool:
        """Whether prompts are shorter than on a machine that is not slow."""
        return self.lengths != _LADDERS[0]

    @property
    def seconds(self) -> float:
        """Of the whole, with a probe."""
        return self.start_s + self.probe_s + self.comparison_s


def choose(machine: Machine, seconds: float | None = None) -> DemoPlan:
    """The longest prompts whose comparison fits, in the quickest dtype.

    Args:
        seconds: for the comparison; None for what six minutes allow.
    """
    token_s = machine.token_s[machine.dtype] * _REST
    comparison_s = seconds or _COMPARISON_S

    def compared(lengths: Sequence[int]) -> float:
        return (_FEWEST + 1) * _ROUND * sum(lengths) * token_s

    lengths = next((ladder for ladder in _LADDERS if compared(ladder) <= comparison_s), _LADDERS[-1])
    # vLLM warms up with one step of all tokens that it may hold.
    return DemoPlan(
        dtype=machine.dtype,
        lengths=lengths,
        compiled=machine.token_s[machine.dtype] < _SLOW_TOKEN_S,
        probe_s=_PROBE_S,
        start_s=_START_S + lengths[-1] * token_s,
        comparison_s=min(comparison_s, compared(lengths) * _MOST / _FEWEST),
    )


def fitting(lengths: Sequence[int], model: CostModel | None, seconds: float) -> tuple[tuple[int, ...], int]:
    """Lengths and rounds that are predicted to fit ``seconds``, the warm-up counted as one round.

    The longest length is left out first where even the fewest rounds don't fit, the shortest never.
    """
    if model is None:
        return tuple(lengths[:1]), _FEWEST
    for count in range(len(lengths), 0, -1):
        chosen = tuple(lengths[:count])
        one = sum(
            plan(model, tokens, STAGES, max_chunk=lengths[-1], policy=policy).ttft_s
            for tokens in chosen
            for policy in POLICIES
        )
        rounds = int(seconds / one) - 1
        if rounds >= _FEWEST:
            return chosen, min(rounds, _MOST)
    return tuple(lengths[:1]), _FEWEST


def time_left(began: float, now: float) -> float:
    """Seconds that the comparison may take when the demo began and is ready for it at these moments."""
    return max(_WHOLE_S - (now - began), _COMPARISON_S / 3)
