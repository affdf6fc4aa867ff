"""Fixtures that start and stop real processes."""

from collections.abc import Iterator

import pytest
from proxy_processes import Start


@pytest.fixture
def start() -> Iterator[Start]:
    starter = Start()
    yield starter
    starter.stop()


@pytest.fixture(scope="module")
def start_once() -> Iterator[Start]:
    starter = Start()
    yield starter
    starter.stop()
