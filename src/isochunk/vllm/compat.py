"""Every coupling to vLLM's inside: why, which versions, when it can go, how it fails, its test.

Tried with vLLM 0.32.0 (its CPU build). Each function that patches raises `ConfigError` when the name it
needs is gone, so that an upgrade fails at start-up and says so, instead of serving without isochunk.
Tests: tests/vllm/test_compat.py.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

from isochunk.core.errors import ConfigError

__all__ = [
    "ExternalHits",
    "aborted_status",
    "add_engine_methods",
    "after_engine_config",
    "alignment",
    "before_busy_loop",
    "device_index_of_cpu",
    "keep_cores",
    "nap_in_nixl",
    "nap_in_queues",
    "passed_over",
    "prefill_requests",
    "prefix_hit",
    "probe_request",
    "runs_on_cpu",
    "token_is_valid",
    "vllm_version",
    "without_prefix_cache",
]

TRIED = "0.32.0"
_ALIGNMENT = 16
_MARK = "_isochunk"


def vllm_version() -> str:
    """Version of the installed vLLM."""
    from vllm.version import __version__

    return str(__version__)


def after_engine_config(check: Callable[[Any], None]) -> None:
    """Call ``check(vllm_config)`` on every engine configuration that vLLM makes.

    Why: vLLM has no hook that lets a plugin see `additional_config` and choose the scheduler class from it.
    Goes when: vLLM offers such a hook, or accepts the scheduler class from `additional_config`.
    """
    from vllm.engine.arg_utils import EngineArgs

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
            config = original(self, *args, **kwargs)
            check(config)
            return config

        return create_engine_config

    _patch_once(EngineArgs, "create_engine_config", wrap)


def before_busy_loop(start: Callable[[Any], None]) -> None:
    """Call ``start(engine_core)`` in the engine's process before it serves its first request.

    Why: the probe needs the whole engine (scheduler, executor, batch queue) and must end before the server
    reports ready; vLLM's front end asks the engine for its tasks before that, and waits for the loop.
    Data-parallel engines, whose ranks step in lockstep, have a loop of their own and are left alone.
    Goes when: vLLM has an engine start-up hook for plugins.
    """
    from vllm.v1.engine.core import EngineCoreProc

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def run_busy_loop(self: Any) -> Any:
            start(self)
            return original(self)

        return run_busy_loop

    _patch_once(EngineCoreProc, "run_busy_loop", wrap)


def add_engine_methods(methods: dict[str, Callable[..., Any]]) -> None:
    """Give the engine core methods that the API process can call by name (its utility calls).

    Why: vLLM lets an endpoint plugin reach workers (`collective_rpc`) but not the scheduler.
    Goes when: vLLM has utility calls for scheduler plugins.
    """
    from vllm.v1.engine.core import EngineCore

    _need(EngineCore, "step_with_batch_queue")
    for name, method in methods.items():
        setattr(EngineCore, name, method)


def prefill_requests(scheduler: Any, most: int) -> tuple[list[Any], int]:
    """Up to ``most`` waiting requests in the order in which vLLM takes them, and how many are behind.

    Why: the queues are internals of `Scheduler`. Blocked requests (waiting for remote KV, a grammar) are
    left out, as vLLM skips them and notes them as deferred.
    """
    from vllm.v1.request import RequestStatus

    ready = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
    queues = (scheduler.kv_holding_waiting, scheduler.waiting)
    walk = islice(chain(*queues), 4 * most)
    found = list(islice((request for request in walk if request.status in ready), most))
    return found, max(sum(map(len, queues)) - len(scheduler.deferred_waiting) - len(found), 0)


def prefix_hit(scheduler: Any, request: Any) -> int:
    """Tokens of a waiting request that are in the local prefix cache.

    Why: `get_computed_blocks` may emit cache events; the coordinator's lookup below it has no side effect
    on statistics or eviction order. The last token is always computed, as vLLM does.
    """
    if request.num_computed_tokens:
        return int(request.num_computed_tokens)
    manager = scheduler.kv_cache_manager
    if not request.block_hashes or not manager.prefix_cache_lookup_enabled(request):
        return 0
    return int(manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)[1])


class ExternalHits:
    """What the KV connector would load of a waiting request, told to vLLM too when it asks the same in that step.

    Why: some connectors count, pin or forget at every `get_num_new_matched_tokens`, so it must not be asked twice.
    Goes when: vLLM knows external hits before it schedules.

    Args:
        connector: of vLLM's scheduler, or None.
        block: tokens of a KV block.
    """

    def __init__(self, connector: Any, block: int) -> None:
        self._block = block
        self._answers: dict[tuple[str, int], tuple[int | None, bool]] = {}
        self._ask: Callable[[Any, int], tuple[int | None, bool]] | None = None
        if connector is not None:
            _need(connector, "get_num_new_matched_tokens")
            self._ask = connector.get_num_new_matched_tokens
            connector.get_num_new_matched_tokens = self._tell

    def history(self, request: Any, hit: int) -> int | None:
        """Tokens that need not be computed, given the local prefix hit; None when vLLM will let the request wait."""
        if self._ask is None or request.num_computed_tokens or request.skip_reading_prefix_cache:
            return hit
        aligned = hit - hit % self._block
        answer = self._answers[request.request_id, aligned] = self._ask(request, aligned)
        more, between_steps = answer
        return None if more is None or between_steps else max(hit, aligned + more)

    def forget(self) -> None:
        """Call it after each step: what could be loaded may be gone in the next."""
        self._answers.clear()

    def _tell(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._ask is not None
        told = self._answers.pop((request.request_id, num_computed_tokens), None)
        return self._ask(request, num_computed_tokens) if told is None else told


@contextmanager
def passed_over(scheduler: Any, requests: Sequence[Any]) -> Iterator[None]:
    """vLLM's next `schedule` leaves these running requests out, and goes on with those behind them.

    Why: it serves running requests in order. It does pass over those whose next decode is not due yet
    (`Request.next_decode_eligible_step`), and looks at nothing else of a request before that.
    Goes when: vLLM shares steps between prompts by itself.
    """
    due = [request.next_decode_eligible_step for request in requests]
    for request in requests:
        request.next_decode_eligible_step = scheduler.current_step + 2
    try:
        yield
    finally:
        for request, step in zip(requests, due, strict=True):
            request.next_decode_eligible_step = step


def alignment(scheduler: Any) -> int:
    """Tokens whose multiples chunks end on: at most 16, or a whole block where vLLM asks for block-aligned chunks.

    Why: vLLM needs whole blocks only for models with Mamba-like state. Blocks are large on some platforms
    (128 tokens on CPUs), where rounding to them made chunks so unequal that a prompt came 10% late.
    """
    block = int(scheduler.block_size)
    if scheduler.need_mamba_block_aligned_split or block % _ALIGNMENT:
        return block
    return _ALIGNMENT


def probe_request(request_id: str, token_ids: list[int]) -> Any:
    """A request that asks for one token, has no client, and names no KV peer.

    Why: made without the front end. It has no block hashes: run it under `without_prefix_cache`. It does not read
    from external KV stores either; one that keeps every prompt by its tokens will keep this one.
    """
    from vllm.v1.request import Request

    from vllm import SamplingParams

    return Request(
        request_id=request_id,
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, skip_reading_prefix_cache=True),
        pooling_params=None,
        block_hasher=None,
    )


@contextmanager
def without_prefix_cache(scheduler: Any) -> Iterator[None]:
    """Switch the prefix cache off for a while, so that probe prompts leave no entry and no event in it.

    Why: with caching on, vLLM stores the blocks of every request and fails on one without hashes.
    """
    managers = [scheduler.kv_cache_manager, *scheduler.kv_cache_manager.coordinator.single_type_managers]
    before = [manager.enable_caching for manager in managers]
    for manager in managers:
        manager.enable_caching = False
    try:
        yield
    finally:
        for manager, enabled in zip(managers, before, strict=True):
            manager.enable_caching = enabled


def runs_on_cpu() -> bool:
    """Whether this is vLLM's CPU platform."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def nap_in_queues(seconds: float) -> None:
    """Readers of vLLM's shared-memory queue sleep for ``seconds`` where they would yield and look again.

    Why: they spin for one second after each message; more processes than cores then keep each other waiting.
    Goes when: vLLM lets `SpinCondition` be told not to spin.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(self: Any, timeout_ms: int | None = None) -> None:
            if time.monotonic() <= self.last_read + self.busy_loop_s:
                time.sleep(seconds)
            else:
                original(self, timeout_ms)

        return wait

    _patch_once(SpinCondition, "wait", wrap)


def nap_in_nixl(seconds: float) -> None:
    """NIXL's progress threads wait up to ``seconds`` for an event where they would look again at once.

    Why: its Python API sets the delay to 0, which takes a core for each agent.
    Goes when: NIXL's `nixl_agent_config` takes a delay.
    """
    from vllm.distributed import nixl_utils

    def with_delay(agent: Callable[..., Any]) -> Callable[..., Any]:
        def create(name: str, config: Any) -> Any:
            config.pthrDelay = round(seconds * 1e6)
            return agent(name, config)

        return create

    def found(wrapper: Any) -> None:
        if wrapper is not None:
            _patch_once(_need(sys.modules[wrapper.__module__], "nixlBind"), "nixlAgent", with_delay)

    def when_loaded(original: Callable[..., Any]) -> Callable[..., Any]:
        def load(name: str) -> Any:
            attribute = original(name)
            if name == "NixlWrapper":
                found(attribute)
            return attribute

        return load

    found(vars(nixl_utils).get("NixlWrapper"))  # loaded already
    _patch_once(nixl_utils, "_load_nixl_attr", when_loaded)


def keep_cores() -> None:
    """NIXL's connector does not move every worker to the last core of its socket.

    Why: on a machine of few cores all stages and nodes would share that one.
    Goes when: the connector keeps to the cores that the worker was bound to.
    """
    from vllm.platforms.cpu import CpuPlatform

    _patch_once(CpuPlatform, "discover_numa_topology", lambda original: lambda *_: [])


def device_index_of_cpu() -> None:
    """`torch.accelerator.current_device_index` is 0 without an accelerator, where it raises.

    Why: vLLM's Mooncake connector asks for it on every platform.
    Goes when: it asks only where there is an accelerator.
    """
    import torch

    if not torch.accelerator.is_available():
        _patch_once(torch.accelerator, "current_device_index", lambda original: lambda: 0)


def aborted_status() -> Any:
    """The status of a request that is given up (`Scheduler.finish_requests`)."""
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


def token_is_valid(headers: Any, keys: list[str]) -> bool:
    """Whether the request carries one of the server's API keys.

    Why: vLLM's middleware guards only its own path prefixes; its own comparison is used for ours.
    """
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    return bool(AuthenticationMiddleware(None, keys).verify_token(headers))


def _patch_once(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method by its wrapped self, unless that was done before: plugins are loaded many times over."""
    original = _need(owner, name)
    if hasattr(original, _MARK):
        return
    patched = functools.wraps(original)(wrap(original))
    setattr(patched, _MARK, True)
    setattr(owner, name, patched)


def _need(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        raise ConfigError(
            f"vLLM {vllm_version()} has no {owner.__name__}.{name}, which isochunk needs (tried with {TRIED}); "
            "upgrade isochunk, or disable it"
        ) from None
