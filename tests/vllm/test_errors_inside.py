"""An error in any function of isochunk's, at whatever moment, costs a plan and nothing else."""

from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

from isochunk.vllm.testing import Engine

from .faults import Faults

# These stand between vLLM and what may fail: their own entry is where vLLM's function was.
GUARDS = {
    *("schedule", "add_request", "get_grammar_bitmask", "update_from_output", "set_pause_state"),
    *("attempt", "_fault", "Bounded.__enter__", "Bounded.__exit__", "Bounded._cut", "Bounded._handle"),
    *("ExternalHits._tell", "ExternalHits.free", "Attempt.__init__"),
}
STORED = 3200


class Stored(ExampleConnector):  # type: ignore[misc]
    """vLLM's example of a connector, with the first tokens of every prompt in store."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return max(STORED - num_computed_tokens, 0), False


def guarded(code: CodeType) -> bool:
    name = code.co_qualname
    return name in GUARDS or name.rsplit(".", 1)[-1] in GUARDS or "/vllm/testing.py" in code.co_filename


def serve(engine: Engine, faults: Faults, name: str, stored: int = 0) -> None:
    """Three prompts, one after two steps of the others; each turn of the engine is watched."""
    lengths = {f"{name}-a": stored + 9000, f"{name}-b": stored + 300, f"{name}-c": stored + 5000}
    first = len(engine.steps)
    with_work = iter(lengths.items())
    for turn in range(1000):
        with faults.watched():
            if turn in (0, 1, 3):
                key, tokens = next(with_work)
                engine.add(key, [hash((name, key, at)) % 999 for at in range(tokens)], output_tokens=3)
            if turn > 3 and not engine.has_work():
                break
            engine.step_fn()
    assert not engine.scheduler.requests, name
    for key, tokens in lengths.items():
        assert sum(step.get(key, 0) for step in engine.steps[first:]) == tokens - stored + 2, (name, key)


@pytest.mark.parametrize("option", ["max_queue_delay", "least_work_first", "max_inter_token_latency", "connector"])
def test_an_error_in_any_function_costs_nothing_but_a_plan(
    make_engine: Callable[..., Engine], tmp_path: Path, option: str
) -> None:
    section: dict[str, Any] = {"enabled": True, "need_timing": True}
    options: dict[str, Any] = {"max_model_len": 16_384}
    stored = 0
    if option == "connector":
        stored = STORED
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="Stored",
            kv_connector_module_path=__name__,
            kv_role="kv_both",
            kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
        )
    else:
        section[option] = 0.2
    engine = make_engine(section, **options)
    health = engine.scheduler.isochunk.health
    faults = Faults()
    serve(engine, faults, "first", stored)
    assert health.failed == 0
    targets = [code for code in faults.calls if not guarded(code)]
    reached = 0
    for at, target in enumerate(targets):
        thrown = faults.thrown
        faults.throw_in(target)
        serve(engine, faults, f"{at} {target.co_qualname}", stored)
        reached += faults.thrown > thrown
    faults.throw_in(None)
    assert reached > 60  # what is called once in a while is not called each time
    assert health.failed > 0
    serve(engine, faults, "last", stored)
    assert engine.scheduler.max_num_scheduled_tokens == 2048
