"""Every coupling to vLLM's inside: why, which versions, when it can go, how it fails, its test.

| file | couplings |
| --- | --- |
| `engine.py` | what vLLM does at start-up: its configuration, its engine loop, methods of its engine |
| `waiting.py` | who waits, and whom vLLM would take in its next step |
| `bounds.py` | what a step is held to: each prompt's chunk, who sits it out |
| `prefixes.py` | how much of a waiting prompt is in the prefix cache |
| `connector.py` | what a KV connector could load, and when it begins |
| `scheduling.py` | what the probe needs: how much the cache holds, requests of its own |
| `ascend.py` | vLLM-Ascend: which one is there, its schedulers, its P nodes |
| `routes.py` | the HTTP routes and the server's keys |
| `spans.py` | the span of a request, where vLLM traces |
| `few_cores.py` | the CPU build with more processes than cores |
| `no_workers.py` | engines without workers, for rehearsals |
| `names.py` | every name and signature that a step needs, looked at before the first one |
| `patching.py` | how a name is replaced, and what is said when it is gone |

The versions are `isochunk.vllm.versions`; "forms" below names what is older than 0.31, and can go with the last
version that has it. Each function that patches raises `ConfigError` when the name it needs is gone, so that an
upgrade fails at start-up and says so, instead of serving without isochunk. Tests: tests/vllm/test_compat.py, on
every version by `python -m tests.versions`.
"""

from isochunk.vllm.compat.ascend import (
    ascend_version,
    balance_scheduling,
    class_that_replaces_schedule,
    decodes_due_by,
    mend_own_schedule,
    own_schedule,
    reads_nested_section,
)
from isochunk.vllm.compat.bounds import Bounded, Bounds, alignment, least_chunk
from isochunk.vllm.compat.connector import ExternalHits
from isochunk.vllm.compat.engine import add_engine_methods, around_engine_config, before_busy_loop
from isochunk.vllm.compat.few_cores import device_index_of_cpu, keep_cores, nap_in_nixl, nap_in_queues, runs_on_cpu
from isochunk.vllm.compat.names import check_names, check_scheduler
from isochunk.vllm.compat.no_workers import use_executor, without_platform
from isochunk.vllm.compat.patching import vllm_version
from isochunk.vllm.compat.prefixes import PATIENCE, Hit, PrefixHits
from isochunk.vllm.compat.routes import add_routes, has_metrics, metrics_registry, token_is_valid
from isochunk.vllm.compat.scheduling import (
    aborted_status,
    kv_cache_tokens,
    most_active,
    probe_request,
    without_prefix_cache,
)
from isochunk.vllm.compat.spans import add_to_spans, is_traced, tell_span
from isochunk.vllm.compat.waiting import (
    adapters_of_running,
    is_paused,
    just_wait,
    prefill_threshold,
    reorder_waiting,
    streams_on,
    waiting_behind,
    waiting_requests,
    waiting_state,
)

__all__ = [
    "PATIENCE",
    "Bounded",
    "Bounds",
    "ExternalHits",
    "Hit",
    "PrefixHits",
    "aborted_status",
    "adapters_of_running",
    "add_engine_methods",
    "add_routes",
    "add_to_spans",
    "alignment",
    "around_engine_config",
    "ascend_version",
    "balance_scheduling",
    "before_busy_loop",
    "check_names",
    "check_scheduler",
    "class_that_replaces_schedule",
    "decodes_due_by",
    "device_index_of_cpu",
    "has_metrics",
    "is_paused",
    "is_traced",
    "just_wait",
    "keep_cores",
    "kv_cache_tokens",
    "least_chunk",
    "mend_own_schedule",
    "metrics_registry",
    "most_active",
    "nap_in_nixl",
    "nap_in_queues",
    "own_schedule",
    "prefill_threshold",
    "probe_request",
    "reads_nested_section",
    "reorder_waiting",
    "runs_on_cpu",
    "streams_on",
    "tell_span",
    "token_is_valid",
    "use_executor",
    "vllm_version",
    "waiting_behind",
    "waiting_requests",
    "waiting_state",
    "without_platform",
    "without_prefix_cache",
]
