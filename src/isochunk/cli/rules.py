"""What can be wrong with a PD deployment, one rule a function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from isochunk.cli.deployment import Deployment, Server
from isochunk.cli.memory import memory_need
from isochunk.core.errors import ConfigError
from isochunk.vllm.config import KEY, ChunkConfig, read_config

__all__ = ["Finding", "check"]

_SAME = ("dtype", "kv-cache-dtype", "block-size", "quantization", "hf-overrides")
_SIZES = (("pipeline", "pp_size"), ("tensor", "tp_size"), ("data", "dp_size"))
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
_SIDE_CHANNEL = ("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
_BOOTSTRAP = ("VLLM_MOONCAKE_BOOTSTRAP_PORT", "8998")

Findings = Iterator["Finding"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong: an error stops the deployment or makes its answers wrong; a warning costs time."""

    level: Literal["error", "warning"]
    where: str
    what: str
    remedy: str

    def as_dict(self) -> dict[str, str]:
        """Plain data for JSON."""
        return asdict(self)


def check(deployment: Deployment) -> list[Finding]:
    """All findings, errors first."""
    found = [f for server in deployment.servers for rule in _SERVER_RULES for f in rule(server)]
    found += [f for rule in _DEPLOYMENT_RULES for f in rule(deployment)]
    return sorted(found, key=lambda f: f.level)


def _error(server: Server | str, what: str, remedy: str) -> Finding:
    return Finding("error", server if isinstance(server, str) else server.name, what, remedy)


def _warning(server: Server | str, what: str, remedy: str) -> Finding:
    return Finding("warning", server if isinstance(server, str) else server.name, what, remedy)


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
    except ConfigError as error:
        yield _error(server, str(error), "correct the key or the value")
        return
    budget = server.number("max-num-batched-tokens")
    if config.min_chunk and budget and config.min_chunk >= budget:
        yield _error(
            server,
            f"min_chunk = {config.min_chunk} is not below --max-num-batched-tokens {budget}",
            "leave min_chunk out, or make it smaller",
        )
    old = (server.options.get("additional-config") or {}).get("profiling_chunk_config")
    if old is not None:
        yield _error(
            server,
            "profiling_chunk_config stands at the top of additional_config, where nothing reads it",
            f"put it at {KEY}",
        )


def _pipeline(server: Server) -> Findings:
    """P has stages and D has none."""
    stages = server.size("pipeline")
    if server.role == "decode":
        if stages > 1:
            yield _error(
                server,
                f"a D node with --pipeline-parallel-size {stages}: connectors refuse it, and it slows each token",
                "drop the option; use tensor or data parallelism on D",
            )
        if _config(server):
            yield _warning(server, "isochunk is on for a D node, which computes no prompts", "enable it on P only")
        return
    if stages == 1:
        level = _error if _config(server) else _warning
        yield level(
            server,
            "a P node without pipeline parallelism: there is nothing for isochunk to plan"
            + (", and it refuses to start" if _config(server) else ""),
            "add --pipeline-parallel-size 2 or more, or switch isochunk off",
        )
    elif not _config(server):
        yield _warning(
            server,
            f"{stages} stages and isochunk is off",
            """add --additional-config '{"scheduler_config": {"profiling_chunk_config": {"enabled": true}}}'""",
        )


def _scheduling(server: Server) -> Findings:
    """Nothing else decides the chunks."""
    if not _config(server):
        return
    if server.options.get("enable-chunked-prefill") is False:
        yield _error(server, "chunked prefill is off, and isochunk plans chunks", "drop --no-enable-chunked-prefill")
    scheduler = str(server.options.get("scheduler-cls", "isochunk."))
    if not scheduler.startswith("isochunk."):
        yield _error(
            server,
            f"--scheduler-cls {scheduler} replaces isochunk's scheduler",
            "drop --scheduler-cls, or switch isochunk off",
        )
    section = (server.options.get("additional-config") or {}).get("scheduler_config") or {}
    if section.get("enable_balance_scheduling"):
        yield _error(server, "enable_balance_scheduling and isochunk exclude each other", "drop one of them")
    if server.role != "decode" and server.options.get("async-scheduling") is True:
        yield _warning(
            server,
            "asynchronous scheduling on a P node: it hides the time between decode steps, of which P has none, and "
            "steps are planned before the last ones are timed",
            "use --no-async-scheduling",
        )
    if server.program == "vllm" and "isochunk" not in server.env.get("VLLM_PLUGINS", "").split(","):
        yield _warning(
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
        yield _error(
            server,
            f"--max-model-len {length} is longer than the rope scaling reaches: {factor} x {original}",
            f"raise the factor to {length / original:.3g}, or shorten --max-model-len",
        )
    if own and length > config.get("max_position_embeddings", own) and not (factor and original):
        yield _error(
            server,
            f"--max-model-len {length} is longer than the model's {own} positions",
            "scale them by yarn in --hf-overrides",
        )
    if own and length > own and server.env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") != "1":
        yield _error(
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
        yield _warning(
            server,
            f"--max-num-batched-tokens {budget} is longer than --max-model-len {length}: memory for steps of that "
            "size is set aside and a single prompt never fills one",
            f"use at most {length}",
        )
    need = memory_need(server, budget, length)
    if need is not None and need.total_gib > need.available_gib:
        yield _error(
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
        yield _error(server, "no --kv-transfer-config: its KV goes nowhere", f'add one with "kv_role": "{want}"')
        return
    if server.kv.get("kv_role") not in (want, "kv_both"):
        yield _error(server, f"kv_role is {server.kv.get('kv_role')!r} on a {server.role} node", f"use {want!r}")
    name = server.connector
    if name in _UNFIT:
        yield _error(server, f"{name} {_UNFIT[name]}", f"use one of {', '.join(_HETEROGENEOUS[:3])}")
    elif name not in _HETEROGENEOUS and "kv_connector_module_path" not in server.kv:
        yield _warning(
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
            yield _warning(
                server,
                f"Mooncake over TCP refuses transfers of more than about 2048 pieces while {variable} is not set",
                f"set {variable}=65535",
            )


def _sizes(server: Server, prefill: Server, decode: Server) -> Findings:
    """What the Ascend connector is told of both sides is what they are."""
    for side, other in (("prefill", prefill), ("decode", decode)):
        told = server.extra.get(side)
        if not isinstance(told, dict):
            yield _error(
                server,
                f"{server.connector} needs kv_connector_extra_config.{side} with the parallel sizes",
                f'add "{side}": {{"tp_size": {other.size("tensor")}, "dp_size": {other.size("data")}, '
                f'"pp_size": {other.size("pipeline")}}}',
            )
            continue
        for kind, key in _SIZES:
            if told.get(key, 1) != other.size(kind):
                yield _error(
                    server,
                    f"kv_connector_extra_config.{side}.{key} is {told.get(key, 'missing')}, and {other.name} has "
                    f"--{kind}-parallel-size {other.size(kind)}",
                    f"set it to {other.size(kind)} on every node",
                )


def _ascend_sizes(deployment: Deployment) -> Findings:
    prefill, decode = deployment.role("prefill"), deployment.role("decode")
    for server in deployment.servers:
        if server.connector in ("MooncakeConnectorV1", "MooncakeLayerwiseConnector") and prefill and decode:
            own_p = server if server.role == "prefill" else prefill[0]
            own_d = server if server.role == "decode" else decode[0]
            yield from _sizes(server, own_p, own_d)


def _same_everywhere(deployment: Deployment) -> Findings:
    """KV of one node means the same to the other."""
    if not deployment.servers:
        return
    first = deployment.servers[0]
    for server in deployment.servers[1:]:
        if server.model.rstrip("/").rsplit("/", 1)[-1] != first.model.rstrip("/").rsplit("/", 1)[-1]:
            yield _error(server, f"serves {server.model}, and {first.name} {first.model}", "serve one model")
        for option in _SAME:
            if server.options.get(option) != first.options.get(option):
                yield _error(
                    server,
                    f"--{option} is {server.options.get(option)}, and {first.options.get(option)} on {first.name}: "
                    "their KV does not mean the same",
                    "use the same value on all nodes",
                )
        if server.connector != first.connector:
            yield _error(server, f"connector {server.connector}, and {first.connector} on {first.name}", "use one")


def _lengths(deployment: Deployment) -> Findings:
    for p in deployment.role("prefill"):
        for d in deployment.role("decode"):
            of_p, of_d = p.number("max-model-len"), d.number("max-model-len")
            if of_p and of_d and of_d < of_p:
                yield _warning(
                    d,
                    f"--max-model-len {of_d} is below the {of_p} of {p.name}: longer prompts are computed and then "
                    "refused",
                    f"use {of_p} or more",
                )


def _unique(deployment: Deployment) -> Findings:
    """Ports on one host, and engine ids everywhere, are not shared."""
    places: Counter[tuple[str, str, str]] = Counter()
    owners: dict[tuple[str, str, str], Server] = {}
    for server in deployment.servers:
        for what, value in _claims(server):
            host = "" if what == "engine_id" else server.host
            places[(host, what, value)] += 1
            owners[(host, what, value)] = server
    for (host, what, value), count in places.items():
        if count > 1:
            where = f" on {host}" if host else ""
            yield _error(owners[(host, what, value)], f"{what} {value} is used {count} times{where}", "use another one")


def _claims(server: Server) -> Iterator[tuple[str, str]]:
    yield "--port", str(server.options.get("port", 8000))
    for key in ("kv_port", "engine_id"):
        if key in server.kv:
            yield key, str(server.kv[key])
    if "Nixl" in str(server.connector):
        yield _SIDE_CHANNEL[0], server.env.get(*_SIDE_CHANNEL)
    if server.connector == "MooncakeConnector" and server.role == "prefill":
        yield _BOOTSTRAP[0], server.env.get(*_BOOTSTRAP)


def _both_roles(deployment: Deployment) -> Findings:
    if len(deployment.servers) < 2:
        return
    for role in ("prefill", "decode"):
        if not deployment.role(role):
            yield _error("deployment", f"no {role} node", f"add one under {role!r}")


def _proxy(deployment: Deployment) -> Findings:
    """The proxy knows all nodes, and no others."""
    if not deployment.proxy:
        return
    options = _lists(deployment.proxy)
    for role, option in (("prefill", "prefiller-port"), ("decode", "decoder-port")):
        told = Counter(options.get(option, []))
        real = Counter(str(server.options.get("port", 8000)) for server in deployment.role(role))
        if "nodes" not in options and told != real:
            yield _error(
                "proxy",
                f"--{option}s {' '.join(told.elements()) or 'is missing'}, and the {role} nodes listen on "
                f"{' '.join(real.elements())}",
                "name each node's --port, in the order of its host",
            )
    boots = any(s.connector == "MooncakeConnector" for s in deployment.role("prefill"))
    if boots and "nodes" not in options and "prefiller-bootstrap-port" not in options:
        yield _error(
            "proxy",
            "MooncakeConnector's D nodes must be told the P nodes' bootstrap servers",
            f"add --prefiller-bootstrap-ports with each P node's {_BOOTSTRAP[0]}",
        )


def _lists(words: tuple[str, ...]) -> dict[str, list[str]]:
    """Options with all their values, in the singular as both forms are accepted."""
    options: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            key, _, value = word[2:].partition("=")
            values = options.setdefault(key.removesuffix("s") if key != "nodes" else key, [])
            values.extend([value] if value else [])
        else:
            values.append(word)
    return options


_SERVER_RULES: tuple[Callable[[Server], Findings], ...] = (
    _section,
    _pipeline,
    _scheduling,
    _long,
    _budget,
    _kv_config,
    _mooncake_tcp,
)
_DEPLOYMENT_RULES: tuple[Callable[[Deployment], Findings], ...] = (
    _both_roles,
    _ascend_sizes,
    _same_everywhere,
    _lengths,
    _unique,
    _proxy,
)
