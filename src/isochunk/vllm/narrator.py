"""What the log says while a server serves: a line a prompt at debug level, a line a minute about what was gained."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from isochunk.vllm.prompts import PromptRecord
from isochunk.vllm.tally import Tally

__all__ = ["Narrator"]

_EVERY_S = 60.0


class Narrator:
    """Tells of prompts as they end, and of the last minute where any ended in it.

    Args:
        logger: takes the lines.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._since: float | None = None
        self._before = Tally()

    def tell(self, now: float, ended: Iterable[PromptRecord], tally: Tally) -> None:
        """Prompts ended at ``now`` (monotonic seconds); ``tally`` counts them already."""
        for record in ended:
            self._logger.debug(
                "isochunk: prompt %s, %d tokens (%d cached), %s: chunks %s; first token after %.3f s%s%s",
                record.request_id,
                record.tokens,
                record.cached,
                record.policy,
                record.chunks,
                record.measured_ttft_s,
                "" if record.predicted_ttft_s is None else f", {record.predicted_ttft_s:.3f} s predicted",
                "" if record.alone else ", beside others",
            )
        if self._since is None:
            self._since = now
        elif now - self._since >= _EVERY_S and tally.prompts > self._before.prompts:
            self._logger.info("isochunk: %s", self._summary(now - self._since, tally))
            self._since, self._before = now, tally.copy()

    def _summary(self, seconds: float, tally: Tally) -> str:
        before = self._before
        prompts, alone = tally.prompts - before.prompts, tally.alone - before.alone
        worked, occupied = tally.busy_s - before.busy_s, tally.occupied_s - before.occupied_s
        text = f"{prompts} prompts of {(tally.tokens - before.tokens) / prompts:.0f} tokens in {seconds:.0f} s"
        if occupied > 0:
            text += f", stages idle {max(1 - worked / occupied, 0.0):.0%} of the time that the pipeline was in use"
        if alone and tally.ttft_s > before.ttft_s:
            took = (tally.ttft_s - before.ttft_s) / alone
            fixed = (tally.ttft_fixed_s - before.ttft_fixed_s) / alone
            predicted = (tally.ttft_predicted_s - before.ttft_predicted_s) / alone
            text += (
                f"; {alone} ran alone: first token after {took:.3g} s on average ({predicted:.3g} predicted), "
                f"with vLLM's own chunks {fixed:.3g} s, {fixed / took:.2f} times as long"
            )
        return text
