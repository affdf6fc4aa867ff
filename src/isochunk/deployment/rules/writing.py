"""How commands are written: found while they are read, before any other rule looks."""

from __future__ import annotations

from isochunk.deployment.node import Node
from isochunk.deployment.rules.rule import Faults, error, of_nodes

__all__ = ["WRITING"]

# Found by the readers, which know the words; stated here, with the others.
WRITING = {
    "cut-off": "a line of options that the shell takes for a command of its own, as the line before it ends one",
    "folded-backslash": "a backslash in a YAML block written with >, which folds lines by itself",
    "blank-after-backslash": "a blank behind a backslash, which then joins no lines",
    "not-exported": "a variable that the server needs is set and not exported",
    "config-file": "a --config file that vLLM would not read",
    "unknown-option": "an option or key that vLLM does not have",
    "stray-word": "a word that belongs to no option",
    "bad-value": "a value that vLLM's parser refuses, or an abbreviation of several options",
    "not-json": "JSON that can't be read",
    "refused": "something else that vLLM's parser refuses",
    "vllm-says": "what vLLM's own configuration refuses, where vLLM is installed",
}


@of_nodes("model-named")
def _model(node: Node) -> Faults:
    """A command names its model; with Python's `-m` of the API server by `--model`."""
    positional = node.given.get("model_tag")
    if node.module and positional is not None:
        yield error(
            node,
            None,
            f"{positional} stands alone, and the API server's module reads --model only",
            f"it would serve {node.model or node.defaults.get('model')}",
            f"write --model {positional}",
        )
    elif node.model is None and node.whole and not {"model", "model_tag"} & node.unknown:
        yield error(
            node,
            "--model",
            "names no model",
            f"vLLM would serve {node.defaults.get('model')}",
            "name it: vllm serve MODEL",
        )


@of_nodes("headless-module")
def _headless(node: Node) -> Faults:
    """`--headless` works with `vllm serve` only."""
    if node.module and node.given.get("headless"):
        yield error(
            node,
            "--headless",
            "--headless with Python's -m of the API server",
            "there it has no effect: this node would open an API of its own and wait for others",
            "start it with 'vllm serve MODEL --headless ...'",
        )
