"""Whether a node deserves traffic, judged by how it answered."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Budget", "Health"]

_IN_A_ROW = 3
_WINDOW, _ENOUGH, _RATE = 20, 10, 0.5  # of so many last answers, at least so many known, so large a part failed
_BASE_S, _LONGEST_S = 5.0, 300.0
_FORGIVEN_S = 600.0  # after the last ejection, the next one is short again
_SHY_S = 1.0


class Health:
    """A circuit breaker.

    Failures open it: the node is left out for a while that doubles each time, then one request at a time tries it,
    and the first good answer closes it again.

    Args:
        clock: tells the time in seconds.

    Attributes:
        proved: it has answered well since it came up, or begun to, and not failed since. After one that broke off in
            the middle, only a whole answer proves it.
        unanswered: requests that wait for its answer.
        ejections: so far.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._row = 0
        self._window: deque[bool] = deque(maxlen=_WINDOW)
        self._until: float | None = None
        self._seconds = 0.0
        self._trials = 0
        self.unanswered = 0
        self._last_end = float("-inf")
        self._refused = -_SHY_S
        self._breaks_off = False
        self.proved = False
        self.ejections = 0

    @property
    def ejected(self) -> bool:
        """It gets no requests but trials."""
        return self._until is not None

    @property
    def takes(self) -> bool:
        """It may be sent a request now."""
        return self._until is None or (self._clock() >= self._until and not self._trials)

    @property
    def shy(self) -> bool:
        """It has just refused what another may accept."""
        return self._clock() - self._refused < _SHY_S

    @contextmanager
    def attempt(self) -> Iterator[Callable[[], None]]:
        """A request waits for the node's answer until the yielded function is called or the context ends.

        While the node is ejected, that is a trial.
        """
        trial = self._until is not None and self._clock() >= self._until
        open_ = True
        self.unanswered += 1
        self._trials += trial

        def answered() -> None:
            nonlocal open_
            if open_:
                open_ = False
                self.unanswered -= 1
                self._trials -= trial

        try:
            yield answered
        finally:
            answered()

    def began(self) -> None:
        """The first part of an answer is as it should be."""
        self._refused = -_SHY_S
        if not self._breaks_off:
            self._prove()

    def well(self) -> None:
        """A whole answer is as it should be."""
        self._row = 0
        self._refused = -_SHY_S
        self._breaks_off = False
        self._window.append(True)
        self._prove()

    def _prove(self) -> None:
        self.proved = True
        if self._until is not None and self._clock() >= self._until:
            self._until = None
            self._window.clear()

    def failed(self, *, midway: bool = False) -> None:
        """It did not answer as it should; ``midway``: after a good beginning."""
        self.proved = False
        self._breaks_off |= midway
        now = self._clock()
        if self._until is not None and now < self._until:
            return  # sent before the ejection
        self._row += 1
        self._window.append(False)
        bad = self._window.count(False)
        if self._until is not None or self._row >= _IN_A_ROW or (
            len(self._window) >= _ENOUGH and bad >= _RATE * len(self._window)
        ):  # fmt: skip
            self._eject(now)

    def refused(self) -> None:
        """It refused a request, which may be the request's fault."""
        self._refused = self._clock()

    def _eject(self, now: float) -> None:
        again = self._until is not None or now - self._last_end < _FORGIVEN_S
        self._seconds = min(self._seconds * 2, _LONGEST_S) if again and self._seconds else _BASE_S
        self._until = self._last_end = now + self._seconds
        self._window.clear()
        self._row = 0
        self.ejections += 1

    def renewed(self) -> None:
        """It came up again, perhaps as another process."""
        self._until = None
        self._row = 0
        self._window.clear()
        self.proved = self._breaks_off = False


class Budget:
    """How many second tries there may be: a part of the requests, so that an outage is not made worse.

    Args:
        clock: tells the time in seconds.
    """

    _MOST, _EACH, _PER_S = 256.0, 0.2, 4.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = self._MOST
        self._at = clock()

    def earn(self) -> None:
        """A request has come."""
        now = self._clock()
        self._left = min(self._left + self._EACH + (now - self._at) * self._PER_S, self._MOST)
        self._at = now

    def spend(self) -> bool:
        """Whether one more try may be made."""
        self.earn()
        self._left -= self._EACH
        if self._left < 1:
            return False
        self._left -= 1
        return True
