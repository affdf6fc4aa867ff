"""vLLM's engine core over virtual stages, in this process and without a server."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from isochunk.vllm import compat
from isochunk.vllm.testing import engine_config
from isochunk.vllm.virtual.executor import VirtualExecutor
from isochunk.vllm.virtual.rehearsal import Rehearsal
from isochunk.vllm.virtual.stages import Stages
from vllm import SamplingParams, envs

FAST = "deepseek-v3.1-w8a8@atlas-a3/pp2tp8/hi"  # as soon as its clocks run so fast
Made = Callable[..., Any]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    made: list[EngineCore] = []

    def make(rehearsal: dict[str, Any] | None = None, **options: Any) -> EngineCore:
        for name, value in Rehearsal(profile=FAST, speed=1e4, **(rehearsal or {})).as_environ().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("VLLM_PLUGINS", "none")
        chosen = {"max_model_len": 4096, "distributed_executor_backend": VirtualExecutor, **options}
        config = engine_config(tmp_path, **chosen)
        made.append(EngineCore(config, VirtualExecutor, log_stats=False))
        return made[-1]

    yield make
    for core in made:
        core.shutdown()
    envs.disable_envs_cache()


def add(core: EngineCore, key: str, tokens: int, **parameters: Any) -> Request:
    request = Request(
        request_id=key,
        prompt_token_ids=[(7 * at + len(key)) % 900 for at in range(tokens)],
        sampling_params=SamplingParams(**{"max_tokens": 1, **parameters}),
        pooling_params=None,
        block_hasher=core.request_block_hasher,
    )
    core.add_request(request)
    return request


def run(core: EngineCore) -> dict[str, list[int]]:
    """Step until nothing is left; the tokens of each answer."""
    said: dict[str, list[int]] = {}
    while core.scheduler.has_requests() or core.batch_queue:
        outputs, _ = core.step_fn()
        for each in (outputs or {}).values():
            for output in each.outputs:
                said.setdefault(output.request_id, []).extend(output.new_token_ids)
    return said


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_every_answer_has_its_tokens(engine: Made, stages: int) -> None:
    core = engine(pipeline_parallel_size=stages)
    for at in range(10):
        add(core, f"r{at}", 100 + 333 * at, max_tokens=1 + at, ignore_eos=True)
    said = run(core)
    assert {key: len(tokens) for key, tokens in said.items()} == {f"r{at}": 1 + at for at in range(10)}


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int], list[int]]]:
    """Chunks, histories and decodes of every step that the clocks took."""
    steps: list[tuple[list[int], list[int], list[int]]] = []
    own = Stages.enter

    def enter(self: Stages, chunks: Any, histories: Any, decodes: Any = ()) -> Any:
        steps.append((list(chunks), list(histories), list(decodes)))
        return own(self, chunks, histories, decodes)

    monkeypatch.setattr(Stages, "enter", enter)
    return steps


def test_the_clocks_take_the_steps_that_vllm_schedules(engine: Made, entered: list[Any]) -> None:
    core = engine(max_num_batched_tokens=1024)
    add(core, "a", 2500, max_tokens=3, ignore_eos=True)
    run(core)
    prompts = [([1024], [0], []), ([1024], [1024], []), ([452], [2048], [])]
    assert entered == [*prompts, ([], [], [2500]), ([], [], [2501])]


def test_a_prefix_hit_is_history(engine: Made, entered: list[Any]) -> None:
    core = engine(enable_prefix_caching=True)
    add(core, "a", 1000)
    run(core)
    add(core, "b", 1000)  # its key is as long, so its tokens are the same
    run(core)
    assert entered == [([1000], [0], []), ([8], [992], [])]


def test_what_is_preempted_is_computed_again_and_says_no_token_twice(engine: Made) -> None:
    core = engine({"kv_tokens": 4096}, enable_prefix_caching=False)
    preempted = []
    own = core.scheduler._preempt_request

    def preempt(request: Request, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return own(request, *args, **kwargs)

    core.scheduler._preempt_request = preempt
    for at in range(6):
        add(core, f"r{at}", 600, max_tokens=200, ignore_eos=True)
    said = run(core)
    assert preempted
    # Each answer is the same words in the same order, however often it was interrupted.
    assert len({tuple(tokens) for tokens in said.values()}) == 1
    assert all(len(tokens) == 200 for tokens in said.values())


def test_answers_end_by_themselves_unless_they_must_go_on(engine: Made) -> None:
    core = engine({"answer_tokens": 5}, hf_overrides={"eos_token_id": 999})
    add(core, "ends", 50, max_tokens=40)
    add(core, "goes on", 50, max_tokens=40, ignore_eos=True)
    add(core, "must not end yet", 50, max_tokens=40, min_tokens=9)
    for request in core.scheduler.requests.values():
        request.sampling_params._eos_token_id = 999
    said = run(core)
    assert len(said["ends"]) == 5
    assert said["ends"][-1] == 999
    assert len(said["goes on"]) == 40
    assert len(said["must not end yet"]) == 10


def test_a_request_gets_only_what_it_allows(engine: Made) -> None:
    core = engine()
    add(core, "a", 50, max_tokens=4, allowed_token_ids=[17, 18], ignore_eos=True)
    assert run(core)["a"] == [17, 18, 17, 18]


def test_the_words_that_are_said_have_a_probability_of_one(engine: Made) -> None:
    core = engine()
    add(core, "a", 50, max_tokens=2, logprobs=3, ignore_eos=True)
    add(core, "b", 3000, max_tokens=1)
    found = []
    while core.scheduler.has_requests() or core.batch_queue:
        outputs, _ = core.step_fn()
        found += [o.new_logprobs for each in (outputs or {}).values() for o in each.outputs if o.request_id == "a"]
    assert len(found) == 2
    for logprobs in found:
        assert logprobs.logprob_token_ids.shape == (1, 4)
        assert logprobs.logprobs[0, 0] == 0.0
        assert len(set(logprobs.logprob_token_ids[0])) == 4


def test_a_prompts_own_tokens_have_a_probability_of_one_too(engine: Made) -> None:
    core = engine(max_num_batched_tokens=256)
    request = add(core, "a", 600, max_tokens=2, prompt_logprobs=2, ignore_eos=True)
    found = []
    while core.scheduler.has_requests() or core.batch_queue:
        outputs, _ = core.step_fn()
        found += [o.new_prompt_logprobs_tensors for each in (outputs or {}).values() for o in each.outputs]
    first, *later = found
    assert first.logprob_token_ids[:, 0].tolist() == request.prompt_token_ids[1:]
    assert first.logprobs[:, 0].tolist() == [0.0] * 599
    assert not any(later)


def test_what_needs_a_worker_is_refused_and_named(engine: Made) -> None:
    core = engine()
    for what in ("add_lora", "profile", "sleep", "save_sharded_state", "reload_weights"):
        with pytest.raises(RuntimeError, match=f"{what} needs a real worker"):
            core.collective_rpc(what)
    add(core, "a", 50)
    assert len(run(core)["a"]) == 1


def test_a_dead_worker_ends_the_engine_as_a_real_one_does(engine: Made) -> None:
    core = engine()
    told = []
    core.model_executor.register_failure_callback(lambda: told.append(True))
    add(core, "a", 4000)
    core.model_executor._stages.pipeline.die("gone")
    with pytest.raises(RuntimeError, match="gone"):
        run(core)
    with pytest.raises(RuntimeError, match="gone"):
        core.model_executor.check_health()


def test_a_probe_that_is_given_up_in_a_deep_pipeline_keeps_the_steps_that_came_out(engine: Made) -> None:
    core = engine(
        pipeline_parallel_size=4,
        max_model_len=65_536,
        scheduler_cls="isochunk.vllm.Scheduler",
        additional_config={"scheduler_config": {"profiling_chunk_config": {"profile": "off"}}},
    )
    controller = core.scheduler.isochunk.controller
    add(core, "isochunk-probe-0", 20_000)
    for _ in range(3):
        core.step_fn()
    core.scheduler.finish_requests("isochunk-probe-0", compat.aborted_status())
    add(core, "a", 10)
    run(core)
    record = controller.log.take("isochunk-probe-0")
    assert record is not None
    assert len(record.steps) == 3
