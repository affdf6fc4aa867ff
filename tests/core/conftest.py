import json
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from isochunk import CostModel

settings.register_profile("ci", deadline=None, max_examples=60)
settings.load_profile("ci")

DATA = Path(__file__).parents[2] / "data"

models = st.builds(
    CostModel,
    c0=st.floats(1e-4, 0.5),
    c1=st.floats(1e-7, 1e-3),
    c2=st.one_of(st.just(0.0), st.floats(1e-12, 1e-6)),
    c3=st.one_of(st.just(0.0), st.floats(1e-10, 1e-5)),
)


def published() -> dict[str, tuple[CostModel, int]]:
    """The published models with the number of stages that they were measured with."""
    text = (DATA / "published_models.json").read_text()
    return {
        name: (CostModel(*(m[k] for k in ("c0", "c1", "c2", "c3"))), m["stages"])
        for name, m in json.loads(text)["models"].items()
    }


@pytest.fixture
def model() -> CostModel:
    """A tiny Qwen3 on two cores, as measured."""
    return CostModel(c0=0.0059, c1=18e-6, c2=20e-9, c3=0.56e-6)
