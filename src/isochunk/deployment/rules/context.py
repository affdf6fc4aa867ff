"""Long contexts: positions, and steps that fit the memory."""

from __future__ import annotations

from collections.abc import Mapping

from isochunk.deployment.kinds import is_ascend
from isochunk.deployment.memory import memory_need
from isochunk.deployment.node import Node
from isochunk.deployment.rules.rule import Faults, error, note, of_nodes
from isochunk.deployment.rules.same import longest

__all__: list[str] = []

_ALLOW = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


def _allowed(node: Node) -> bool:
    return node.env.get(_ALLOW, "0").strip().lower() in ("1", "true")


@of_nodes("length-within-positions")
def _positions(node: Node) -> Faults:
    """`--max-model-len` is within the model's positions, or rope scaling reaches so far."""
    length, own = node.number("max_model_len"), node.shape.positions
    if length is None or own is None or length <= own or "max_model_len" in node.unknown:
        return
    reach = _reach(node)
    if reach is None and _allowed(node):
        yield error(
            node,
            "--max-model-len",
            f"--max-model-len {length} is longer than the model's {own} positions",
            "beyond them answers are noise",
            "scale them by yarn in --hf-overrides",
        )
    elif reach is not None and length > reach[0] * reach[1]:
        yield error(
            node,
            "--max-model-len",
            f"--max-model-len {length} is longer than the rope scaling reaches: {reach[0]:g} x {reach[1]}",
            "beyond it answers are noise",
            f"raise the factor to {length / reach[1]:.3g}, or shorten --max-model-len",
        )
    elif not _allowed(node) and not (is_ascend(node) and reach is not None):
        yield error(
            node,
            "--max-model-len",
            f"--max-model-len {length} is longer than the {own} positions that vLLM derives from the model",
            "vLLM refuses it",
            f"set {_ALLOW}=1 (with rope scaling that reaches so far), or use at most {own}",
        )


def _reach(node: Node) -> tuple[float, int] | None:
    """Factor and original positions of yarn, where the configuration scales by it."""
    overrides = node.get("hf_overrides")
    overrides = overrides if isinstance(overrides, Mapping) else {}
    config = {**node.shape.config, **overrides}
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, Mapping):
        return None
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if isinstance(factor, (int, float)) and isinstance(original, int) and factor > 0 and original > 0:
        return float(factor), original
    return None


@of_nodes("step-holds-prompt")
def _unchunked(node: Node) -> Faults:
    """Without chunked prefill a step holds the longest prompt."""
    budget, length = node.number("max_num_batched_tokens"), longest(node)
    if node.get("enable_chunked_prefill") is False and budget and length and 0 < budget < length:
        yield error(
            node,
            "--max-num-batched-tokens",
            f"--max-num-batched-tokens {budget} is below --max-model-len {length}, and chunked prefill is off",
            "vLLM refuses it",
            f"raise it to {length}, or drop --no-enable-chunked-prefill",
        )


@of_nodes("step-holds-requests")
def _requests(node: Node) -> Faults:
    """A step has at least a token for each request."""
    budget, many = node.number("max_num_batched_tokens"), node.given.get("max_num_seqs")
    if budget and isinstance(many, int) and budget < many:
        yield error(
            node,
            "--max-num-seqs",
            f"--max-num-seqs {many} is above --max-num-batched-tokens {budget}",
            "vLLM refuses it",
            f"use at most {budget}",
        )


@of_nodes("step-within-length")
def _budget(node: Node) -> Faults:
    """A step on P is not longer than the longest prompt."""
    budget, length = node.number("max_num_batched_tokens"), node.number("max_model_len")
    if node.role != "decode" and budget and length and 0 < length < budget:
        yield note(
            node,
            "--max-num-batched-tokens",
            f"--max-num-batched-tokens {budget} is longer than --max-model-len {length}",
            "memory for steps of that size is set aside, and a single prompt never fills one",
            f"use at most {length}",
        )


@of_nodes("step-fits-memory")
def _memory(node: Node) -> Faults:
    """A step of the token budget fits the device beside the weights and the KV of one longest prompt."""
    budget, length = node.number("max_num_batched_tokens"), node.number("max_model_len")
    if node.role == "decode" or budget is None:
        return
    need = memory_need(node, budget, length if length and length > 0 else None)
    if need is not None and need.total_gib > need.available_gib:
        yield error(
            node,
            "--max-num-batched-tokens",
            f"a step of {budget} tokens needs about {need.activations_gib:.1f} GiB a device, beside "
            f"{need.weights_gib:.1f} GiB of weights and {need.kv_gib:.1f} GiB of KV for one longest prompt; there "
            f"are {need.available_gib:.1f} GiB",
            "vLLM stops, or runs out of memory later",
            "lower --max-num-batched-tokens: isochunk plans within it; or more stages, or a shorter --max-model-len",
        )
