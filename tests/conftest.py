"""For all tests: no deadlines for hypothesis' examples, and signs of life for whoever waits for the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("unhurried", deadline=None)  # an example may take as long as a busy machine needs
settings.load_profile("unhurried")

_EVERY_S = 15.0
_KNOWN = "isochunk/seconds"
_GUESSES = {True: 15.0, False: 0.25}  # seconds of a test that starts an engine, and of one that does not


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SignsOfLife(config), "signs-of-life")


class SignsOfLife:
    """Says what will run and about how long it takes, then every few seconds what is done and what is left."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._cache = getattr(config, "cache", None)  # pytest may run without one
        self._known: dict[str, float] = dict(self._cache.get(_KNOWN, {})) if self._cache else {}
        self._left: dict[str, float] = {}
        self._total = 0
        self._now = "collecting"
        self._since = time.monotonic()
        self._done = threading.Event()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly:
            return
        engines = {item.nodeid: item.get_closest_marker("engine") is not None for item in session.items}
        self._left = {name: self._known.get(name, _GUESSES[engine]) for name, engine in engines.items()}
        self._total = len(engines)
        how = "by the last run here" if self._known else "a guess before the first run here"
        self._say(
            f"{self._total} tests, {sum(engines.values())} of them start engines: "
            f"{_minutes(sum(self._left.values()))} ({how})"
        )
        threading.Thread(target=self._talk, daemon=True).start()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._now, self._since = item.nodeid, time.monotonic()
        yield
        self._known[item.nodeid] = round(time.monotonic() - self._since, 3)
        self._left.pop(item.nodeid, None)

    def pytest_sessionfinish(self) -> None:
        self._done.set()
        if self._cache is not None:
            self._cache.set(_KNOWN, self._known)

    def _talk(self) -> None:
        while not self._done.wait(_EVERY_S):
            left = list(self._left.values())
            self._say(
                f"{self._total - len(left)} of {self._total} done, {_minutes(sum(left))} left; "
                f"{self._now}, for {time.monotonic() - self._since:.0f} s"
            )

    def _say(self, text: str) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"{time.strftime('%H:%M:%S')} {text}")


def _minutes(seconds: float) -> str:
    return f"about {seconds / 60:.0f} min" if seconds > 90 else f"about {seconds:.0f} s"
