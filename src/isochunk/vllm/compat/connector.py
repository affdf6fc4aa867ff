"""What a KV connector says that it could load of a waiting request."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from isochunk.vllm.compat.bounds import wait_their_turn
from isochunk.vllm.compat.patching import need

__all__ = ["ExternalHits"]

_Answer = tuple[int | None, bool]


class ExternalHits:
    """Stands between vLLM and its KV connector: hears what could be loaded, and has loads start when vLLM alone would.

    Why: vLLM starts an asynchronous load where its scan of the waiting requests comes to it. The scan ends where the
    step's tokens do; with a budget below vLLM's own it ends early, and what could have been loaded meanwhile is loaded
    after. So the scan goes on as far as vLLM's own budget would reach, and who has nothing to load is told "ask again
    later" there, which has vLLM pass him over. Some connectors count, pin or forget at every
    `get_num_new_matched_tokens`: it is asked at most once for a request in a step, and once besides in all.
    Goes when: vLLM starts loads apart from its steps.

    Args:
        connector: of vLLM's scheduler, or None.
        block: tokens of a KV block.
        errors: takes what fails here while vLLM asks; it is told what its connector says then.
    """

    def __init__(self, connector: Any, block: int, errors: list[Exception]) -> None:
        self._block = block
        self._errors = errors
        self._answers: dict[tuple[str, int], _Answer] = {}
        self._computed: dict[str, int] = {}  # requests that have nothing to load between steps, what else they had
        self._reach: _Reach | None = None
        self._put_off: list[Any] = []
        self._ask: Callable[[Any, int], _Answer] | None = None
        if connector is not None:
            self._ask = need(connector, "get_num_new_matched_tokens")
            connector.get_num_new_matched_tokens = self._tell

    @property
    def used(self) -> bool:
        """Whether there is a connector."""
        return self._ask is not None

    def history(self, request: Any, hit: int) -> int | None:
        """Tokens that need not be computed, given the local prefix hit; None when vLLM will let the request wait.

        To be asked for requests that vLLM takes in this step: it is told the same.
        """
        if self._ask is None or request.num_computed_tokens or request.skip_reading_prefix_cache:
            return hit
        aligned = hit - hit % self._block
        answer = self._answers.get((request.request_id, aligned))
        if answer is None:
            answer = self._answers[request.request_id, aligned] = self._ask(request, aligned)
        more, between_steps = answer
        return None if more is None or between_steps else max(hit, aligned + more)

    def known(self, request: Any, hit: int) -> int:
        """Tokens that need not be computed as far as is known, given the local prefix hit."""
        return max(self._computed.get(request.request_id, 0), hit) if self._computed else hit

    def may_load(self, request: Any) -> bool:
        """Whether this waiting request could turn out to have something to load between steps."""
        known = request.request_id in self._computed or request.num_computed_tokens
        return self._ask is not None and not known and not request.skip_reading_prefix_cache

    def reach(self, planned: Collection[str], tokens: int, requests: int, threshold: int) -> None:
        """In this step vLLM's scan goes on behind those that are planned.

        Args:
            planned: ids of requests that are served in this step.
            tokens: what running requests would leave of vLLM's own budget.
            requests: how many more may run.
            threshold: most tokens of one request; 0 for no such bound.
        """
        self._reach = _Reach(planned, tokens, requests, threshold)

    def passing(self, tokens: int) -> None:
        """vLLM's scan passes a request that waits for its turn, and that alone would take so many."""
        if self._reach is not None and tokens:
            self._reach.take(tokens)

    def forget(self, scheduler: Any) -> None:
        """Call it after each step: what could be loaded may be gone in the next."""
        self._answers.clear()
        self._reach = None
        if self._put_off:
            wait_their_turn(scheduler, self._put_off)
            self._put_off = []

    def gone(self, request_ids: Collection[str]) -> None:
        """These requests are no more, or begin anew."""
        for key in request_ids:
            self._computed.pop(key, None)

    def free(self) -> None:
        """vLLM's next scan is its own."""
        self._reach = None

    def _tell(self, request: Any, num_computed_tokens: int) -> _Answer:
        assert self._ask is not None
        told = None
        try:
            told = self._known_answer(request, num_computed_tokens)
        except Exception as error:  # noqa: BLE001 - vLLM is in the middle of its step
            self._errors.append(error)
        if told is None:
            told = self._ask(request, num_computed_tokens)
        try:
            return self._put_in_turn(request, num_computed_tokens, told)
        except Exception as error:  # noqa: BLE001 - as above
            self._errors.append(error)
            return told

    def _known_answer(self, request: Any, num_computed_tokens: int) -> _Answer | None:
        """What was heard before; None when the connector has to be asked."""
        key, reach = request.request_id, self._reach
        told = self._answers.pop((key, num_computed_tokens), None)
        if (
            told is None
            and reach is not None
            and key not in reach.planned
            and (key in self._computed or not reach.open)
        ):
            return max(self._computed.get(key, 0) - num_computed_tokens, 0), False
        return told

    def _put_in_turn(self, request: Any, num_computed_tokens: int, told: _Answer) -> _Answer:
        """The answer as vLLM is given it: "ask again later" for who has nothing to load and whose turn it is not."""
        reach, (more, between_steps) = self._reach, told
        if reach is None or more is None or (between_steps and more):
            return told
        key, over = request.request_id, not reach.open
        reach.take(int(request.num_tokens) - num_computed_tokens - more)
        if key in reach.planned:
            return told
        if over:
            return 0, False  # its cap is 0 tokens, with which vLLM ends its scan
        self._computed[key] = num_computed_tokens + more
        self._put_off.append(request)
        return None, False


class _Reach:
    """How far vLLM's own budget would go."""

    __slots__ = ("_requests", "_threshold", "_tokens", "planned")

    def __init__(self, planned: Collection[str], tokens: int, requests: int, threshold: int) -> None:
        self.planned, self._tokens, self._requests, self._threshold = planned, tokens, requests, threshold

    @property
    def open(self) -> bool:
        return self._tokens > 0 and self._requests > 0

    def take(self, lacks: int) -> None:
        self._tokens -= min(lacks, self._threshold) if self._threshold else lacks
        self._requests -= 1
