"""A rehearsed server: its command, and one that runs while it is needed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from isochunk.core.errors import ConfigError
from isochunk.deployment.launch import Launch, launch
from isochunk.deployment.server import free_port, running_process
from isochunk.vllm.virtual.rehearsal import Rehearsal
from isochunk.vllm.virtual.stand_in import ALWAYS_REFUSED, needs_a_worker, too_many_stages

__all__ = ["MODEL_NAME", "rehearsed", "running_rehearsal", "tiny_model"]

MODEL_NAME = "rehearsal"

_STAGES = ("--pipeline-parallel-size", "-pp")
_LONGEST = 1 << 18
_PROBE_S = 60.0  # of which it takes a part: what is foretold to end later than this is not begun


def tiny_model() -> Path:
    """Folder of a configuration of 64 layers with a tokenizer of 1024 tokens; no weights."""
    return Path(str(files("isochunk.vllm.virtual") / "model"))


def rehearsed(
    rehearsal: Rehearsal, arguments: Sequence[str], environ: Mapping[str, str], *, stages: int | None = None
) -> Launch:
    """Command line and environment of vLLM's server on the rehearsal's virtual stages.

    Args:
        arguments: the model's folder, or nothing for the tiny one, and then vLLM's options.
        stages: their number; by default what the options say, or else the profile.

    Raises:
        ConfigError: an option is wrong.
        ProfileError: the profile can't be read.
    """
    named = bool(arguments) and not arguments[0].startswith("-")
    model = arguments[0] if named else str(tiny_model())
    options = list(arguments[1:] if named else arguments)
    options += (
        ["--pipeline-parallel-size", str(_stages(rehearsal, options, stages))]
        if stages or not _has(options, *_STAGES)
        else []
    )
    if not named:
        options += [] if _has(options, "--served-model-name") else ["--served-model-name", MODEL_NAME]
        options += [] if _has(options, "--max-model-len") else ["--max-model-len", str(_LONGEST)]
    _refuse(model, options)
    environment = {**environ, **rehearsal.as_environ()}
    # The engine has no device that a fork would lose, and need not import everything again.
    environment.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    environment.setdefault("ISOCHUNK_OPEN_POLICY", "1")  # there is nothing to protect
    if Path(model).is_dir():
        environment.setdefault("HF_HUB_OFFLINE", "1")
    section = {"max_probe_seconds": _PROBE_S}
    return launch(model, _local(options), environment, virtual=True, section=section)


@contextmanager
def running_rehearsal(
    rehearsal: Rehearsal,
    arguments: Sequence[str] = (),
    *,
    log: Path,
    stages: int | None = None,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = 300.0,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[str]:
    """A rehearsed server on a free port of the loopback address; yields its URL and stops it at the end.

    Raises:
        ConfigError: it ended, or did not answer in time; with the end of its log.
    """
    port = free_port()
    chosen = [*arguments, "--host", "127.0.0.1", "--port", str(port)]
    command, environment = rehearsed(rehearsal, chosen, {**os.environ, **(environ or {})}, stages=stages)
    url = f"http://127.0.0.1:{port}"
    with running_process(command, environment, health=f"{url}/health", log=log, timeout_s=timeout_s, progress=progress):
        yield url


def _stages(rehearsal: Rehearsal, options: Sequence[str], stages: int | None) -> int:
    if stages is not None:
        if _has(options, *_STAGES):
            raise ConfigError("--stages and --pipeline-parallel-size say the same: drop one of them")
        return stages
    profile = rehearsal.known()
    told = len(profile.stage_models) or profile.key.get("pipeline_parallel") or profile.fit.get("stages")
    if not isinstance(told, int):
        raise ConfigError(
            f"--profile {rehearsal.profile} does not say on how many stages it was measured: add --stages"
        )
    return told


def _refuse(model: str, options: Sequence[str]) -> None:
    """What the words alone show, said before vLLM is imported; the configuration itself is looked at after that."""
    for option in options:
        name = option.partition("=")[0].partition(".")[0].replace("_", "-")
        if name in ALWAYS_REFUSED:
            raise needs_a_worker(name)
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        layers = int({**config, **(config.get("text_config") or {})}["num_hidden_layers"])
    except (OSError, ValueError, TypeError, KeyError):
        return  # vLLM knows more kinds of models
    rest = iter(options)
    for option in rest:
        name, equals, value = option.partition("=")
        if name.replace("_", "-") in _STAGES:
            value = value if equals else next(rest, "")
            if value.isdigit() and int(value) > layers:
                raise too_many_stages(int(value), layers, model)


def _has(options: Sequence[str], *names: str) -> bool:
    return any(option.partition("=")[0].replace("_", "-") in names for option in options)


def _local(options: Sequence[str]) -> list[str]:
    """The options without a choice of who runs the workers, which are not there."""
    kept: list[str] = []
    rest = iter(options)
    for option in rest:
        name, equals, _ = option.partition("=")
        if name.replace("_", "-") != "--distributed-executor-backend":
            kept.append(option)
        elif not equals:
            next(rest, None)
    return [*kept, "--distributed-executor-backend", "mp"]
