import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# vLLM and torch warn about their own code when they are imported and configured.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vLLM is not installed: these tests run its own scheduler")
    from isochunk.vllm.testing import Engine, engine_config

from isochunk import CostModel

MODEL = CostModel(c0=0.0059, c1=18e-6, c2=20e-9, c3=0.56e-6)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's profiles."""
    monkeypatch.setenv("ISOCHUNK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> Iterator[pytest.LogCaptureFixture]:
    """What isochunk logs; vLLM's loggers don't always hand it on."""
    engine_config(tmp_path)  # vLLM's first one sets up its loggers, and takes the handlers of those below its own away
    logger = logging.getLogger("vllm.isochunk")
    logger.addHandler(caplog.handler)
    with caplog.at_level("INFO", logger="vllm.isochunk"):
        yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture
def make_engine(tmp_path: Path) -> Callable[..., Engine]:
    """An engine without a model, its scheduler chosen by vLLM; with isochunk's model when it is enabled."""

    def make(
        section: dict[str, Any] | None = None, *, blocks: int = 20_000, in_flight: int = 2, **options: Any
    ) -> Engine:
        if section is not None:
            section = {"need_timing": False, **section}  # a step without a model behind it takes no time to learn from
        engine = Engine(engine_config(tmp_path, section, **options), blocks=blocks, in_flight=in_flight)
        if section is not None:
            engine.scheduler.isochunk.controller.use_model(MODEL, "test")
        return engine

    return make


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of vLLM's and torch's own code are not ours to mend."""
    for item in items:
        if "tests/vllm" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore"))
