"""Finds the server or proxy inside what starts it: ``env``, ``nohup``, ``bash -c``, ``ssh``, ``docker run``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from isochunk.deployment.command import UNKNOWN, Command, Word
from isochunk.deployment.script import read_script

__all__ = ["Proxy", "Serve", "unwrap"]

_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main", "vllm", "isochunk", "isochunk.proxy")
_PROXY_SCRIPT = re.compile(r"([\w./-]*(?:proxy|router)[\w.-]*\.py|vllm-router|routing-proxy|.*/vllm-router)")
_RUNNERS = frozenset(("ssh", "tmux", "screen", "eval", "pdsh", "clush", "su", "runuser", "parallel", "xargs", "watch"))
_CONTAINERS = frozenset(("docker", "podman", "nerdctl"))
_IMAGE = re.compile(r"vllm", re.IGNORECASE)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_MENTIONS = re.compile(r"vllm\s+serve|isochunk\s+(serve|proxy)|api_server|proxy\w*\.py|vllm-router")
_DOCKER_SWITCHES = frozenset(
    [
        "-d",
        "-t",
        "-i",
        "-it",
        "-ti",
        "-dit",
        "-itd",
        "-td",
        "-P",
        "--rm",
        "--detach",
        "--interactive",
        "--tty",
        "--privileged",
        "--init",
        "--read-only",
        "--quiet",
        "-q",
        "--oom-kill-disable",
        "--no-healthcheck",
        "--publish-all",
        "--sig-proxy",
    ]
)
_DEEPEST = 4


@dataclass(frozen=True, slots=True)
class Serve:
    """A vLLM server: what starts it, and its arguments; ``module`` for Python's ``-m`` of the API server."""

    command: Command
    program: str
    arguments: tuple[Word, ...]
    module: bool = False


@dataclass(frozen=True, slots=True)
class Proxy:
    """What stands in front of the nodes, by its name, and its arguments."""

    command: Command
    program: str
    arguments: tuple[Word, ...]


def unwrap(command: Command, depth: int = 0) -> Iterator[Serve | Proxy]:
    """All servers and proxies that a command starts; none for a command of another kind.

    Raises:
        ConfigError: a script inside it can't be read.
    """
    words = list(command.words)
    if depth > _DEEPEST or not words:
        return
    base = _base(words[0])
    if base in _CONTAINERS and "run" in words[:3]:
        yield from _docker(command, words, depth)
        return
    if base == "env" or _ASSIGNMENT.fullmatch(words[0]):
        yield from _assignments(command, words, depth)
        return
    for index, word in enumerate(words):
        found = _server(words, index) or _proxy(words, index)
        if found is not None:
            kind, program, start, module = found
            inner = _with_env(command, words[:index])
            rest = tuple(words[start:])
            yield Serve(inner, program, rest, module) if kind == "serve" else Proxy(inner, program, rest)
            return
        if " " in word and _MENTIONS.search(word) and _runs_text(words, index):
            yield from _script(command, words[:index], word, depth)
            return


def _base(word: str) -> str:
    return word.rsplit("/", 1)[-1]


def _server(words: Sequence[Word], at: int) -> tuple[str, str, int, bool] | None:
    base, following = _base(words[at]), words[at + 1 : at + 2]
    if base in ("vllm", "isochunk") and following == ["serve"]:
        return "serve", base, at + 2, False
    if base in _MODULES[:1] or words[at].endswith("vllm/entrypoints/openai/api_server.py"):
        return "serve", "vllm", at + 1, True
    if words[at] in _MODULES[1:4] and words[at - 1 : at] == ["-m"] and following == ["serve"]:
        return "serve", "isochunk" if words[at] == "isochunk" else "vllm", at + 2, False
    return None


def _proxy(words: Sequence[Word], at: int) -> tuple[str, str, int, bool] | None:
    base, following = _base(words[at]), words[at + 1 : at + 2]
    if base == "isochunk" and following == ["proxy"]:
        return "proxy", "isochunk", at + 2, False
    runs = at == 0 or _base(words[at - 1]).startswith("python") or words[at - 1] in ("-u", "run", "exec", "-m", "nohup")
    if runs and _PROXY_SCRIPT.fullmatch(words[at]):
        return "proxy", base, at + 1, False
    if words[at - 1 : at] == ["-m"] and re.search(r"proxy|vllm_router|sglang_router", words[at]):
        return "proxy", words[at], at + 1, False
    return None


def _runs_text(words: Sequence[Word], at: int) -> bool:
    """Whether a text among the words is a script that is run."""
    return bool(_RUNNERS & {_base(word) for word in words[:at]}) or bool(re.fullmatch(r"-\w*c", words[at - 1]))


def _with_env(command: Command, before: Sequence[Word]) -> Command:
    """With the assignments that stand among the words before the program, as ``env A=b`` has them."""
    found = [match for word in before if (match := _ASSIGNMENT.fullmatch(word))]
    return replace(command, env={**command.env, **{match[1]: match[2] for match in found}}) if found else command


def _assignments(command: Command, words: list[Word], depth: int) -> Iterator[Serve | Proxy]:
    at = 1 if _base(words[0]) == "env" else 0
    env = dict(command.env)
    while at < len(words) and (_ASSIGNMENT.fullmatch(words[at]) or words[at].startswith("-")):
        if found := _ASSIGNMENT.fullmatch(words[at]):
            env[found[1]] = found[2]
        at += 1
    yield from unwrap(replace(command, env=env, words=tuple(words[at:])), depth + 1)


def _script(command: Command, before: Sequence[Word], text: Word, depth: int) -> Iterator[Serve | Proxy]:
    """``bash -c TEXT`` here, ``ssh HOST TEXT`` elsewhere."""
    host = command.host
    if before and _base(before[0]) == "ssh":
        host = next((word.rpartition("@")[2] for word in before[1:] if not word.startswith("-")), host)
    env = {} if before and _base(before[0]) == "ssh" else {**command.env}
    for inner in read_script(text, command.place.file, first_line=max(text.line, 1), env=env):
        merged = replace(
            inner,
            name=command.name,
            role=command.role,
            host=host,
            devices=command.devices,
            device_gib=command.device_gib,
            model_config=command.model_config,
            published=command.published,
            image=command.image,
            contained=command.contained,
            findings=(*command.findings, *inner.findings),
        )
        yield from unwrap(merged, depth + 1)


def _docker(command: Command, words: list[Word], depth: int) -> Iterator[Serve | Proxy]:
    options, at = _docker_options(words, words.index(Word("run")) + 1)
    env = {}
    for option, value in options:
        if option in ("-e", "--env") and "=" in value:
            name, _, text = value.partition("=")
            env[name] = text
        elif option in ("-e", "--env") and value in command.env:
            env[value] = command.env[value]
    named = dict(options)
    shared = "host" in (named.get("--network"), named.get("--net"))
    host = command.host if shared else f"container {named.get('--name') or f'in line {words[0].line}'}"
    published = tuple(pair for option, value in options if option in ("-p", "--publish") for pair in _published(value))
    gpus, chosen = _gpus(named.get("--gpus"))
    if chosen:
        env["NVIDIA_VISIBLE_DEVICES"] = chosen
    arguments = tuple(words[at + 1 :])
    entry = named.get("--entrypoint")
    if entry:
        arguments = (Word(entry, words[0].line), *arguments)
    inner = replace(
        command,
        words=arguments,
        env=env,
        host=host,
        published=published,
        image=words[at] if at < len(words) else "",
        contained=True,
        devices=gpus if gpus is not None else command.devices,
    )
    found = list(unwrap(inner, depth + 1))
    if not found and at < len(words) and _IMAGE.search(words[at]) and not entry:
        found = [Serve(inner, "vllm", arguments)]
    yield from found


def _docker_options(words: Sequence[Word], at: int) -> tuple[list[tuple[str, Word]], int]:
    options = []
    while at < len(words) and words[at].startswith("-"):
        name, equals, value = words[at].partition("=")
        at += 1
        if equals:
            options.append((name, Word(value)))
        elif re.fullmatch(r"-[epv].+", name):
            options.append((name[:2], Word(words[at - 1][2:])))
        elif name not in _DOCKER_SWITCHES and at < len(words):
            options.append((name, words[at]))
            at += 1
    return options, at


def _published(value: str) -> Iterator[tuple[int, int]]:
    """Host port and container port of ``8100:8000`` or ``127.0.0.1:8100:8000``."""
    parts = value.removesuffix("/tcp").split(":")
    if len(parts) >= 2 and parts[-1].isdigit() and parts[-2].isdigit():
        yield int(parts[-2]), int(parts[-1])


def _gpus(value: str | None) -> tuple[int | None, str]:
    """How many devices ``--gpus`` gives, and their names where it says them."""
    if value is None or UNKNOWN in value:
        return None, ""
    value = value.strip("\"'")
    if value.isdigit():
        return int(value), ""
    found = re.search(r"device=([\w,:-]+)", value)
    names = [part for part in found[1].split(",") if part] if found else []
    return (len(names), ",".join(names)) if names else (None, "")
