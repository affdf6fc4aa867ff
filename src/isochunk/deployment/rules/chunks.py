"""isochunk on P: its section, stages to plan for, and nothing else that decides the chunks."""

from __future__ import annotations

from collections.abc import Mapping

from isochunk.deployment.kinds import is_ascend
from isochunk.deployment.node import Node
from isochunk.deployment.rules.rule import Faults, error, note, of_nodes, warning

__all__: list[str] = []

_ON = """--additional-config '{"scheduler_config": {"profiling_chunk_config": {"enabled": true}}}'"""


def _section(node: Node, *path: str) -> Mapping[str, object]:
    value = node.get("additional_config")
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _ours(node: Node) -> Mapping[str, object]:
    """isochunk's section, from where it counts."""
    return _section(node, "scheduler_config", "profiling_chunk_config") or _section(node, "profiling_chunk_config")


@of_nodes("section-reads")
def _reads(node: Node) -> Faults:
    """isochunk's section has only keys that there are, with values in their range."""
    if node.section_fault:
        yield error(
            node, "--additional-config", node.section_fault, "isochunk stops the start", "correct the key or the value"
        )


@of_nodes("section-place")
def _place(node: Node) -> Faults:
    """isochunk's section stands in `scheduler_config`, once."""
    top, nested = _section(node, "profiling_chunk_config"), _section(node, "scheduler_config", "profiling_chunk_config")
    if top and nested:
        yield warning(
            node,
            "--additional-config",
            "profiling_chunk_config stands twice, at the top and in scheduler_config",
            "only the one in scheduler_config counts",
            "drop the one at the top",
        )
    elif top:
        yield warning(
            node,
            "--additional-config",
            "profiling_chunk_config stands at the top of additional_config",
            "that is the old place, and vLLM-Ascend before 0.25 reads it there for a planner of its own",
            "put it at additional_config.scheduler_config.profiling_chunk_config",
        )


@of_nodes("planner-there")
def _planner(node: Node) -> Faults:
    """The section leaves planning to vLLM-Ascend only where that is installed."""
    for section in (
        _section(node, "scheduler_config", "profiling_chunk_config"),
        _section(node, "profiling_chunk_config"),
    ):
        if section.get("planner") == "ascend" and not is_ascend(node) and node.role != "decode" and _on_cuda(node):
            yield error(
                node,
                "--additional-config",
                "planner = 'ascend' without vLLM-Ascend",
                "isochunk stops the start",
                "leave 'planner' out",
            )


def _on_cuda(node: Node) -> bool:
    return any(name.startswith(("CUDA", "HIP", "NVIDIA")) for name in node.env)


@of_nodes("delay-or-priority")
def _priority(node: Node) -> Faults:
    """`max_queue_delay` is not used with `--scheduling-policy priority`."""
    if node.plans and _ours(node).get("max_queue_delay") is not None and node.get("scheduling_policy") == "priority":
        yield error(
            node,
            "--scheduling-policy",
            "max_queue_delay and --scheduling-policy priority exclude each other",
            "a late prompt would pass one of a better priority, and isochunk stops the start",
            "drop one of them",
        )


@of_nodes("ascend-own-schedule")
def _copy(node: Node) -> Faults:
    """P nodes of vLLM-Ascend 0.23 have a copy of vLLM's schedule(), in which `max_queue_delay` does nothing."""
    said = node.plans and _ours(node).get("max_queue_delay") is not None
    if said and is_ascend(node) and node.kv.get("kv_role") == "kv_producer":
        yield note(
            node,
            "--additional-config",
            "max_queue_delay on a P node of vLLM-Ascend",
            "its version 0.23 schedules with a copy of schedule() there, in which nobody can sit a step out",
            "use vLLM-Ascend 0.25 or later, or drop the key",
        )


@of_nodes("stages-on-p")
def _stages(node: Node) -> Faults:
    """isochunk has stages to plan for: `--pipeline-parallel-size` of 2 or more on P."""
    stages = node.size("pipeline")
    if stages is None or node.role == "decode":
        return
    if stages == 1 and node.plans:
        yield error(
            node,
            "--pipeline-parallel-size",
            "a P node without pipeline parallelism: there is nothing for isochunk to plan",
            "isochunk refuses to start",
            "add --pipeline-parallel-size 2 or more, or switch isochunk off",
        )
    elif stages > 1 and node.plans is False and not node.headless:
        yield note(
            node,
            "--additional-config",
            f"{stages} stages and isochunk is off",
            "chunks of one size leave stages waiting for each other",
            f"add {_ON}",
        )


@of_nodes("isochunk-on-p-only")
def _on_decode(node: Node) -> Faults:
    """isochunk is on for P nodes only."""
    if node.role == "decode" and node.plans:
        yield error(
            node,
            "--additional-config",
            "isochunk is on for a D node, which computes no prompts",
            "it refuses to start without pipeline stages, which D must not have",
            "start D with 'vllm serve' and without isochunk's section",
        )


@of_nodes("chunked-prefill-on")
def _chunked(node: Node) -> Faults:
    """Chunked prefill is on where isochunk is."""
    if node.plans and node.get("enable_chunked_prefill") is False:
        yield error(
            node,
            "--enable-chunked-prefill",
            "chunked prefill is off, and isochunk plans chunks",
            "isochunk refuses to start",
            "drop --no-enable-chunked-prefill",
        )


@of_nodes("min-chunk-fits")
def _min_chunk(node: Node) -> Faults:
    """`min_chunk` is below the token budget of a step."""
    budget, least = node.number("max_num_batched_tokens"), node.min_chunk
    if least and budget and least >= budget:
        yield error(
            node,
            "--additional-config",
            f"min_chunk = {least} is not below --max-num-batched-tokens {budget}",
            "isochunk refuses to start",
            "leave min_chunk out, or make it smaller",
        )


@of_nodes("one-scheduler")
def _one(node: Node) -> Faults:
    """No other scheduler class stands beside isochunk's."""
    name = node.get("scheduler_cls")
    if node.plans and isinstance(name, str) and not name.startswith("isochunk."):
        yield error(
            node,
            "--scheduler-cls",
            f"--scheduler-cls {name} replaces isochunk's scheduler",
            "only one class can schedule",
            "drop --scheduler-cls, or switch isochunk off",
        )


@of_nodes("async-scheduling-on-p")
def _async(node: Node) -> Faults:
    """No asynchronous scheduling on P with isochunk."""
    if node.plans and node.role != "decode" and node.given.get("async_scheduling") is True:
        yield warning(
            node,
            "--async-scheduling",
            "asynchronous scheduling on a P node",
            "it hides the time between decode steps, of which P has none, and steps are planned before the "
            "last ones are timed",
            "use --no-async-scheduling",
        )


@of_nodes("status-route")
def _status(node: Node) -> Faults:
    """A P node shows its cost model, so that the proxy routes by seconds."""
    named = node.env.get("VLLM_PLUGINS", "").split(",")
    if (
        node.role != "decode"
        and node.plans
        and node.program == "vllm"
        and "isochunk" not in named
        and not node.headless
    ):
        yield warning(
            node,
            None,
            "/isochunk/status is off",
            "the proxy can't see the cost model and routes by tokens",
            "start it with 'isochunk serve', or set VLLM_PLUGINS=isochunk (with any other plugin you use)",
        )
