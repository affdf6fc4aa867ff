"""What must be one on P and D, as it resolves and not as it is written, or KV means something else to the other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping

from isochunk.deployment.command import is_unknown
from isochunk.deployment.kinds import NIXL, handing_over, is_ascend
from isochunk.deployment.node import Deployment, Node
from isochunk.deployment.rules.rule import Faults, error, of_deployment, warning

__all__ = ["api_keys", "longest"]

_DTYPES = {"half": "float16", "float": "float32", "fp8_e4m3": "fp8"}
_WHY = "their KV does not mean the same, and answers are wrong"


def _peers(deployment: Deployment) -> Iterator[tuple[Node, Node]]:
    """The first node with a role, and each other with one."""
    nodes = [node for node in deployment.nodes if node.role]
    yield from ((nodes[0], node) for node in nodes[1:])


def _base(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/"))[-1].lower()


@of_deployment("one-model")
def _model(deployment: Deployment) -> Faults:
    """All nodes serve one model."""
    for first, node in _peers(deployment):
        if not first.model or not node.model or {"model", "model_tag"} & (first.unknown | node.unknown):
            continue
        if _base(first.model) != _base(node.model):
            what = f"serves {node.model}, and {first.name} {first.model}"
            yield error(node, "--model", what, _WHY, "serve one model")


@of_deployment("one-tokenizer")
def _tokenizer(deployment: Deployment) -> Faults:
    """All nodes make the same tokens: tokenizer, its mode, and its revision."""
    yield from _compare(
        deployment,
        "tokenizer",
        lambda node: _base(str(node.get("tokenizer") or node.model or "")),
        "the same text becomes other tokens on D than those whose KV it gets",
    )
    for option in ("tokenizer_mode", "tokenizer_revision"):
        yield from _compare(
            deployment,
            option,
            lambda node, option=option: node.get(option),  # type: ignore[misc]
            "the same text becomes other tokens on D than those whose KV it gets",
        )


@of_deployment("one-revision")
def _revision(deployment: Deployment) -> Faults:
    """All nodes load one revision of the weights and of their code."""
    for option in ("revision", "code_revision"):
        yield from _compare(deployment, option, lambda node, option=option: node.get(option) or "main", _WHY)  # type: ignore[misc]


@of_deployment("one-dtype")
def _dtype(deployment: Deployment) -> Faults:
    """All nodes compute in one dtype and keep KV in one."""
    yield from _compare(deployment, "dtype", _resolved_dtype, _WHY)
    yield from _compare(deployment, "kv_cache_dtype", _resolved_kv_dtype, _WHY)


def _resolved_dtype(node: Node) -> str | None:
    """The dtype; None for one that the checkpoint decides and that is not known."""
    said = str(node.get("dtype"))
    if said != "auto":
        return _DTYPES.get(said, said)
    told = node.shape.config.get("torch_dtype") or node.shape.config.get("dtype")
    if isinstance(told, str):
        return "bfloat16" if told == "float32" else told
    return "bfloat16" if node.shape.heads else None


def _resolved_kv_dtype(node: Node) -> str | None:
    said = str(node.get("kv_cache_dtype"))
    return _resolved_dtype(node) if said == "auto" else _DTYPES.get(said, said)


@of_deployment("one-block-size")
def _blocks(deployment: Deployment) -> Faults:
    """P and D have blocks of one size; with NIXL P's may divide D's."""
    for prefill, decode in deployment.pairs():
        p, d = _resolved_block(prefill), _resolved_block(decode)
        if "block_size" in prefill.unknown | decode.unknown or p & d:
            continue
        small, large = min(p), min(d)
        if handing_over(prefill) & handing_over(decode) & NIXL and large % small == 0 and small < large:
            continue
        yield error(
            decode,
            "--block-size",
            f"--block-size is {_shown(decode)}, and {_shown(prefill)} on {prefill.name}",
            _WHY,
            "use the same value on all nodes",
        )


def _resolved_block(node: Node) -> frozenset[int]:
    """Block sizes that a node may have: the given one, or those that platforms choose."""
    given = node.number("block_size")
    if given is not None:
        return frozenset((given,))
    return frozenset((128,)) if is_ascend(node) else frozenset((16, 64, 128) if node.shape.latent else (16, 128))


def _shown(node: Node) -> str:
    given = node.number("block_size")
    return str(given) if given is not None else f"{min(_resolved_block(node))} (not given)"


@of_deployment("one-override")
def _overrides(deployment: Deployment) -> Faults:
    """All nodes change the model's configuration in the same way."""
    yield from _compare(
        deployment,
        "hf_overrides",
        lambda node: json.dumps(node.get("hf_overrides") or {}, sort_keys=True),
        "their KV does not mean the same: positions or shapes differ",
    )


@of_deployment("one-quantization")
def _quantization(deployment: Deployment) -> Faults:
    """All nodes quantise alike."""
    for first, node in _peers(deployment):
        one, other = first.get("quantization"), node.get("quantization")
        if one and other and one != other and "quantization" not in first.unknown | node.unknown:
            yield error(
                node,
                "--quantization",
                f"--quantization is {other}, and {one} on {first.name}",
                _WHY,
                "use the same on all nodes",
            )


@of_deployment("one-attention")
def _attention(deployment: Deployment) -> Faults:
    """With NIXL all nodes that name an attention backend name the same."""
    for first, node in _peers(deployment):
        one, other = _backend(first), _backend(node)
        if one and other and one != other and handing_over(first) & handing_over(node) & NIXL:
            yield error(
                node,
                "--attention-backend",
                f"--attention-backend is {other}, and {one} on {first.name}",
                "NIXL refuses the handshake: the blocks are laid out in another way",
                "use the same on all nodes",
            )


def _backend(node: Node) -> str | None:
    config = node.get("attention_config")
    value = node.get("attention_backend") or (config.get("backend") if isinstance(config, Mapping) else None)
    return str(value or node.env.get("VLLM_ATTENTION_BACKEND") or "").upper() or None


@of_deployment("one-speculation")
def _speculation(deployment: Deployment) -> Faults:
    """With NIXL a draft model that reads hidden states (EAGLE, MTP) is on all nodes or on none."""
    for prefill, decode in deployment.pairs():
        if (
            not handing_over(prefill) & handing_over(decode) & NIXL
            or "speculative_config" in prefill.unknown | decode.unknown
        ):
            continue
        of_p, of_d = _method(prefill), _method(decode)
        if of_p != of_d:
            yield error(
                decode,
                "--speculative-config",
                f"speculative method {of_d}, and {of_p} on {prefill.name}",
                "NIXL compares it and refuses the handshake",
                "use the same method on P and D",
            )


def _method(node: Node) -> str | None:
    config = node.get("speculative_config")
    method = str(config.get("method") or "") if isinstance(config, Mapping) else ""
    return method if re.search(r"eagle|mtp", method) else None


@of_deployment("one-lora")
def _lora(deployment: Deployment) -> Faults:
    """All nodes have the same LoRA adapters."""
    yield from _compare(
        deployment,
        "enable_lora",
        lambda node: bool(node.get("enable_lora")),
        "a request for an adapter fails on one side, or gets the base model's KV",
    )
    for first, node in _peers(deployment):
        mine, theirs = _adapters(node), _adapters(first)
        if mine != theirs and "lora_modules" not in node.unknown | first.unknown:
            odd = sorted(mine ^ theirs)[0]
            yield error(
                node,
                "--lora-modules",
                f"adapter {odd} is on {node.name if odd in mine else first.name} only",
                "a request for it fails on the other side",
                "load the same adapters on all nodes",
            )


def _adapters(node: Node) -> frozenset[str]:
    modules = node.get("lora_modules")
    return (
        frozenset(str(each["name"]) for each in modules if isinstance(each, Mapping) and "name" in each)
        if isinstance(modules, list)
        else frozenset()
    )


@of_deployment("one-served-name")
def _served(deployment: Deployment) -> Faults:
    """A request's model name is served by P and by D."""
    for prefill, decode in deployment.pairs():
        of_p, of_d = _names(prefill), _names(decode)
        if not of_p or not of_d or of_p == of_d:
            continue
        told = f"--served-model-name {' '.join(sorted(of_d))}, and {' '.join(sorted(of_p))} on {prefill.name}"
        if of_p & of_d:
            yield warning(
                decode,
                "--served-model-name",
                told,
                "a request by a name that one side lacks gets 404",
                "use the same names",
            )
        else:
            yield error(
                decode,
                "--served-model-name",
                told,
                "the proxy sends one name to both, and one answers 404",
                "use the same --served-model-name on all nodes",
            )


def _names(node: Node) -> frozenset[str]:
    """Names under which a node serves; none when they are not written down."""
    if {"served_model_name", "model", "model_tag"} & node.unknown or not node.whole:
        return frozenset()
    names = node.get("served_model_name")
    names = names if isinstance(names, list) and names else [node.model] if node.model else []
    return frozenset(map(str, names))


@of_deployment("lengths-fit")
def _lengths(deployment: Deployment) -> Faults:
    """D takes prompts as long as P does."""
    for prefill, decode in deployment.pairs():
        of_p, of_d = longest(prefill), longest(decode)
        if of_p and of_d and of_d < of_p:
            yield warning(
                decode,
                "--max-model-len",
                f"--max-model-len {of_d} is below the {of_p} of {prefill.name}",
                "longer prompts are computed and then refused",
                f"use {of_p} or more",
            )


def longest(node: Node) -> int | None:
    """Longest context of a node, given or the model's."""
    length = node.number("max_model_len")
    if "max_model_len" in node.unknown or length == -1:
        return None
    return length if length is not None else node.shape.positions


@of_deployment("one-api-key")
def _keys(deployment: Deployment) -> Faults:
    """The nodes take one API key, as a proxy sends the same to all."""
    for first, node in _peers(deployment):
        mine, theirs = api_keys(node), api_keys(first)
        if mine and theirs and not mine & theirs:
            yield error(
                node,
                "--api-key",
                f"its API key is not that of {first.name}",
                "the proxy sends one key to all nodes, and one side answers 401",
                "use one key for all nodes",
            )


def api_keys(node: Node) -> frozenset[str] | None:
    """API keys that a node takes: none for any; None when they are not written down."""
    if "api_key" in node.unknown or node.headless or is_unknown(node.env.get("VLLM_API_KEY")):
        return None
    keys = node.get("api_key")
    told = node.env.get("VLLM_API_KEY")
    return frozenset(map(str, keys)) if isinstance(keys, list) else frozenset((told,) if told else ())


def _compare(deployment: Deployment, option: str, resolved: Callable[[Node], object], why: str) -> Faults:
    """One value on all nodes where it is known."""
    for first, node in _peers(deployment):
        one, other = resolved(first), resolved(node)
        if (one is None and other is None) or option in first.unknown | node.unknown:
            continue
        if None in (one, other) and option in ("dtype", "kv_cache_dtype"):
            continue
        if one != other:
            flag = "--" + option.replace("_", "-")
            yield error(
                node,
                flag,
                f"{flag} is {_said(node, option, other)}, and {_said(first, option, one)} on {first.name}",
                why,
                "use the same value on all nodes",
            )


def _said(node: Node, option: str, resolved: object) -> str:
    given = node.given.get(option)
    if given is None:
        return f"{resolved} (not given)"
    return json.dumps(given, sort_keys=True) if isinstance(given, (dict, list)) else str(given)


@of_deployment("one-version")
def _version(deployment: Deployment) -> Faults:
    """All nodes run one version of vLLM, as far as images say it."""
    for first, node in _peers(deployment):
        one, other = _tag(first), _tag(node)
        if not one or not other or one == other:
            continue
        level = error if handing_over(first) & handing_over(node) & NIXL else warning
        yield level(
            node,
            None,
            f"its image is of {other}, and {first.name}'s of {one}",
            "connectors change with vLLM: NIXL compares versions and refuses the handshake",
            "use one image",
        )


def _tag(node: Node) -> str | None:
    found = re.search(r"vllm[^:@]*:v?(\d+\.\d+(?:\.\d+)?)", node.image)
    return found[1] if found else None
