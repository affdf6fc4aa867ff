"""What can be wrong with one node of a deployment, one rule a function."""

from __future__ import annotations

from collections.abc import Callable

from isochunk.cli.deployment import Server
from isochunk.cli.finding import Findings, error, warning
from isochunk.cli.memory import memory_need
from isochunk.core.errors import ConfigError
from isochunk.vllm.config import KEY, ChunkConfig, read_config

__all__ = ["NODE_RULES"]

_HETEROGENEOUS = ("NixlPushConnector", "MooncakeConnector", "MooncakeConnectorV1", "MooncakeLayerwiseConnector")
_UNFIT = {
    "NixlConnector": "pulls, and fails every request when P has stages (number of KV layers must match)",
    "NixlPullConnector": "pulls, and fails every request when P has stages (number of KV layers must match)",
    "ExampleConnector": "stores the first chunk of a prompt only, and a longer one ends the D node",
    "SharedStorageConnector": "stores the first chunk of a prompt only, and a longer one ends the D node",
    "OffloadingConnector": "keeps KV for its own node and hands none over",
    "SimpleCPUOffloadConnector": "keeps KV for its own node and hands none over",
    "LMCacheConnectorV1": "computes the prompt again on D without a word where it can't transfer",
}


def _config(server: Server) -> ChunkConfig | None:
    """The plugin's section when it is right and on."""
    try:
        config = read_config(server.options.get("additional-config"))
    except ConfigError:
        return None
    return config if config.enabled or server.program == "isochunk" else None


def _section(server: Server) -> Findings:
    """The plugin's section can be read, and its sizes fit."""
    try:
        config = read_config(server.options.get("additional-config"))
    except ConfigError as fault:
        yield error(server, str(fault), "correct the key or the value")
        return
    budget = server.number("max-num-batched-tokens")
    if config.min_chunk and budget and config.min_chunk >= budget:
        yield error(
            server,
            f"min_chunk = {config.min_chunk} is not below --max-num-batched-tokens {budget}",
            "leave min_chunk out, or make it smaller",
        )
    old = (server.options.get("additional-config") or {}).get("profiling_chunk_config")
    if old is not None:
        yield error(
            server,
            "profiling_chunk_config stands at the top of additional_config, where nothing reads it",
            f"put it at {KEY}",
        )


def _pipeline(server: Server) -> Findings:
    """P has stages and D has none."""
    stages = server.size("pipeline")
    if server.role == "decode":
        if stages > 1:
            yield error(
                server,
                f"a D node with --pipeline-parallel-size {stages}: connectors refuse it, and it slows each token",
                "drop the option; use tensor or data parallelism on D",
            )
        if _config(server):
            yield warning(server, "isochunk is on for a D node, which computes no prompts", "enable it on P only")
        return
    if stages == 1:
        level = error if _config(server) else warning
        yield level(
            server,
            "a P node without pipeline parallelism: there is nothing for isochunk to plan"
            + (", and it refuses to start" if _config(server) else ""),
            "add --pipeline-parallel-size 2 or more, or switch isochunk off",
        )
    elif not _config(server):
        yield warning(
            server,
            f"{stages} stages and isochunk is off",
            """add --additional-config '{"scheduler_config": {"profiling_chunk_config": {"enabled": true}}}'""",
        )


def _scheduling(server: Server) -> Findings:
    """Nothing else decides the chunks."""
    if not _config(server):
        return
    if server.options.get("enable-chunked-prefill") is False:
        yield error(server, "chunked prefill is off, and isochunk plans chunks", "drop --no-enable-chunked-prefill")
    scheduler = str(server.options.get("scheduler-cls", "isochunk."))
    if not scheduler.startswith("isochunk."):
        yield error(
            server,
            f"--scheduler-cls {scheduler} replaces isochunk's scheduler",
            "drop --scheduler-cls, or switch isochunk off",
        )
    section = (server.options.get("additional-config") or {}).get("scheduler_config") or {}
    if section.get("enable_balance_scheduling"):
        yield error(server, "enable_balance_scheduling and isochunk exclude each other", "drop one of them")
    if server.role != "decode" and server.options.get("async-scheduling") is True:
        yield warning(
            server,
            "asynchronous scheduling on a P node: it hides the time between decode steps, of which P has none, and "
            "steps are planned before the last ones are timed",
            "use --no-async-scheduling",
        )
    if server.program == "vllm" and "isochunk" not in server.env.get("VLLM_PLUGINS", "").split(","):
        yield warning(
            server,
            "/isochunk/status is off, so the proxy can't see the cost model and routes by tokens",
            "start it with 'isochunk serve', or set VLLM_PLUGINS=isochunk (with any other plugin you use)",
        )


def _long(server: Server) -> Findings:
    """A context longer than the model's is allowed and scaled."""
    length = server.number("max-model-len")
    overrides = server.options.get("hf-overrides") or {}
    config = {**server.model_config, **overrides}
    own = server.model_config.get("max_position_embeddings")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if length is None:
        return
    if factor and original and length > factor * original:
        yield error(
            server,
            f"--max-model-len {length} is longer than the rope scaling reaches: {factor} x {original}",
            f"raise the factor to {length / original:.3g}, or shorten --max-model-len",
        )
    if own and length > config.get("max_position_embeddings", own) and not (factor and original):
        yield error(
            server,
            f"--max-model-len {length} is longer than the model's {own} positions",
            "scale them by yarn in --hf-overrides",
        )
    if own and length > own and server.env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") != "1":
        yield error(
            server,
            f"--max-model-len {length} is longer than the {own} in the model's config.json, which vLLM refuses",
            "set VLLM_ALLOW_LONG_MAX_MODEL_LEN=1",
        )


def _budget(server: Server) -> Findings:
    """A step of the token budget fits the context and the memory."""
    budget, length = server.number("max-num-batched-tokens"), server.number("max-model-len")
    if server.role == "decode" or budget is None:
        return
    if length and budget > length:
        yield warning(
            server,
            f"--max-num-batched-tokens {budget} is longer than --max-model-len {length}: memory for steps of that "
            "size is set aside and a single prompt never fills one",
            f"use at most {length}",
        )
    need = memory_need(server, budget, length)
    if need is not None and need.total_gib > need.available_gib:
        yield error(
            server,
            f"a step of {budget} tokens needs about {need.activations_gib:.1f} GiB a device, beside "
            f"{need.weights_gib:.1f} GiB of weights and {need.kv_gib:.1f} GiB of KV for one longest prompt; there "
            f"are {need.available_gib:.1f} GiB",
            "lower --max-num-batched-tokens: isochunk plans within it; or more stages, or a shorter --max-model-len",
        )


def _kv_config(server: Server) -> Findings:
    """A connector is named, with the node's role, and it can do what is asked of it."""
    if server.role is None:
        return
    want = "kv_producer" if server.role == "prefill" else "kv_consumer"
    if not server.kv:
        yield error(server, "no --kv-transfer-config: its KV goes nowhere", f'add one with "kv_role": "{want}"')
        return
    if server.kv.get("kv_role") not in (want, "kv_both"):
        yield error(server, f"kv_role is {server.kv.get('kv_role')!r} on a {server.role} node", f"use {want!r}")
    name = server.connector
    if name in _UNFIT:
        yield error(server, f"{name} {_UNFIT[name]}", f"use one of {', '.join(_HETEROGENEOUS[:3])}")
    elif name not in _HETEROGENEOUS and "kv_connector_module_path" not in server.kv:
        yield warning(
            server,
            f"connector {name!r} is not known to take a P with stages and a D without",
            f"known to: {', '.join(_HETEROGENEOUS)}; test another with prompts never seen before, in float32",
        )


def _mooncake_tcp(server: Server) -> Findings:
    """Mooncake over TCP takes long prompts only with larger queues."""
    if server.extra.get("mooncake_protocol") != "tcp":
        return
    for variable in ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER"):
        if variable not in server.env:
            yield warning(
                server,
                f"Mooncake over TCP refuses transfers of more than about 2048 pieces while {variable} is not set",
                f"set {variable}=65535",
            )


NODE_RULES: tuple[Callable[[Server], Findings], ...] = (
    _section,
    _pipeline,
    _scheduling,
    _long,
    _budget,
    _kv_config,
    _mooncake_tcp,
)
