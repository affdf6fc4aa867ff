from collections.abc import Iterator

import pytest

from isochunk.bench.fake import FakePrefill, serving


@pytest.fixture
def fake() -> FakePrefill:
    return FakePrefill()


@pytest.fixture
def url(fake: FakePrefill) -> Iterator[str]:
    with serving(fake) as url:
        yield url
