"""Deployments in files: our own YAML, compose, Kubernetes, Helm values with containers, and shell scripts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from isochunk.core.errors import ConfigError
from isochunk.deployment.command import UNKNOWN, Command, Place, Word
from isochunk.deployment.finding import Finding
from isochunk.deployment.marked_yaml import Text, load_all
from isochunk.deployment.script import read_script
from isochunk.deployment.wrappers import Proxy, Serve, unwrap

__all__ = ["Started", "read_text"]

Started = Serve | Proxy

_OWN = frozenset(("prefill", "decode", "proxy", "nodes"))
_NODE = ("command", "env", "host", "device_gib", "model_config", "devices", "name")
_ROLES = {"prefill": "prefill", "prefiller": "prefill", "p": "prefill", "decode": "decode", "decoder": "decode"}


def read_text(text: str, file: str) -> list[Started]:
    """All servers and proxies of a file, in its order.

    Raises:
        ConfigError: the file is of no form that is known, or there is nothing in it.
    """
    if PurePath(file).suffix in (".yaml", ".yml", ".json"):
        found = [each for document in load_all(text, file) for each in _document(document, file)]
    else:
        found = [each for command in read_script(text, file) for each in unwrap(command)]
    if not found:
        raise ConfigError(
            f"{file}: no 'vllm serve MODEL', 'isochunk serve MODEL' or 'vllm.entrypoints.openai.api_server'"
        )
    return found


def _document(document: Any, file: str) -> Iterator[Started]:
    if not isinstance(document, Mapping):
        if document is None:
            return
        raise ConfigError(
            f"{file}: expected the lists 'prefill' and 'decode' and the command 'proxy', a compose file or "
            "Kubernetes objects"
        )
    if "services" in document:
        for name, service in _mapping(document["services"], file, "services").items():
            yield from _service(name, service, file)
    elif isinstance(document.get("items"), list):
        for item in document["items"]:
            yield from _document(item, file)
    elif "kind" in document or any(True for _ in _containers(document, None, 0)):
        yield from _objects(document, file)
    elif set(document) <= _OWN and document:
        yield from _own(document, file)
    else:
        unknown = next((key for key in document if key not in _OWN), "nothing")
        raise ConfigError(f"{file}: expected the lists 'prefill' and 'decode' and the command 'proxy', not {unknown!r}")


def _own(document: Mapping[str, Any], file: str) -> Iterator[Started]:
    for role in ("prefill", "decode", "nodes"):
        entries = document.get(role)
        if entries is not None and not isinstance(entries, list):
            raise ConfigError(f"{file}: {role!r} must be a list of nodes")
        for index, entry in enumerate(entries or []):
            name = f"{role}[{index}]"
            found = list(_entry(entry, None if role == "nodes" else role, name, file))
            if not found:
                raise ConfigError(
                    f"{file}: {name}: no 'vllm serve MODEL', 'isochunk serve MODEL' or "
                    "'vllm.entrypoints.openai.api_server'"
                )
            yield from found
    if document.get("proxy"):
        found = list(_entry(document["proxy"], None, "proxy", file))
        command = Command(words=_words(document["proxy"]), place=Place(file))
        yield from found or [Proxy(command, "proxy", command.words)]


def _entry(entry: Any, role: str | None, name: str, file: str) -> Iterator[Started]:
    if isinstance(entry, (str, list)):
        entry = {"command": entry}
    if not isinstance(entry, Mapping) or "command" not in entry or not set(entry) <= set(_NODE):
        raise ConfigError(
            f"{file}: {name} must be a command, or a mapping with 'command' and maybe {', '.join(_NODE[1:])}"
        )
    base = Command(
        words=(),
        env=_environment(entry.get("env"), f"{file}: {name}"),
        place=Place(file, getattr(entry["command"], "line", 0)),
        name=str(entry.get("name") or name),
        role=role,
        host=str(entry["host"]) if "host" in entry else None,
        devices=_whole(entry.get("devices"), f"{file}: {name}: devices"),
        device_gib=_size(entry.get("device_gib"), f"{name}: device_gib"),
        model_config=str(entry["model_config"]) if entry.get("model_config") else None,
    )
    yield from _started(base, entry["command"], file)


def _whole(value: Any, what: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{what} = {value!r} must be a number of accelerators")
    return value


def _size(value: Any, what: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ConfigError(f"{what} = {value!r} must be the GiB of one device, above 0")
    return float(value)


def _started(base: Command, command: Any, file: str) -> Iterator[Started]:
    """What a command starts that is a text (with its block's style) or a list of words."""
    if isinstance(command, list):
        yield from unwrap(replace(base, words=_words(command)))
        return
    text = str(command)
    findings: tuple[Finding, ...] = ()
    if getattr(command, "style", "") in (">", "", '"', "'") and (slash := re.search(r"\\[ \t]+(?=-)", text)):
        findings = (_folded_backslash(file, getattr(command, "line", 0), text[slash.end() :].split(maxsplit=1)[0]),)
        text = re.sub(r"\\[ \t]+", " ", text)
    for inner in read_script(text, file, first_line=max(getattr(command, "line", 1), 1), env=base.env):
        merged = replace(
            base,
            words=inner.words,
            env=inner.env,
            clustered=inner.clustered,
            place=inner.place,
            findings=(*base.findings, *findings, *inner.findings),
        )
        findings = ()
        yield from unwrap(merged)


def _folded_backslash(file: str, line: int, option: str) -> Finding:
    return Finding(
        level="error",
        rule="folded-backslash",
        node="",
        option=option,
        file=file,
        line=line,
        what="a backslash in a YAML block that folds its lines",
        why=f"the line's end is already a blank there, so the backslash makes ' {option}' one word, which vLLM refuses",
        remedy="drop the backslashes, or write the block with | in place of >",
    )


def _words(command: Any) -> tuple[Word, ...]:
    if isinstance(command, list):
        return tuple(Word(str(each), getattr(each, "line", 0)) for each in command)
    return tuple(Word(each) for each in str(command).split())


def _mapping(value: Any, file: str, what: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{file}: {what} must be a mapping")
    return value


def _environment(value: Any, what: str) -> dict[str, str]:
    """A mapping, a list of ``A=b``, or a list of mappings with ``name`` and ``value``."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return {key: _text(each) for key, each in value.items()}
    if not isinstance(value, list):
        raise ConfigError(f"{what}: env must be a mapping or a list")
    made = {}
    for each in value:
        if isinstance(each, Mapping) and "name" in each:
            made[str(each["name"])] = _text(each["value"]) if "value" in each else UNKNOWN + str(each["name"])
        elif isinstance(each, str) and "=" in each:
            name, _, text = each.partition("=")
            made[name] = text
        elif isinstance(each, str):
            made[each] = UNKNOWN + each
    return made


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    return re.sub(r"\$\{?\w+[^}\s]*\}?", lambda found: UNKNOWN + found[0].strip("${}"), text) if "$" in text else text


# Compose ------------------------------------------------------------------------------------------------------------


def _service(name: str, service: Any, file: str) -> Iterator[Started]:
    service = _mapping(service, file, f"service {name}")
    host = None if service.get("network_mode") == "host" else name
    reserved, chosen = _reserved(service)
    env = _environment(service.get("environment"), f"{file}: {name}")
    base = Command(
        words=(),
        env={"NVIDIA_VISIBLE_DEVICES": chosen, **env} if chosen else env,
        contained=True,
        place=Place(file, getattr(service.get("command"), "line", 0)),
        name=name,
        role=_role_in(name),
        host=host,
        published=tuple(_ports(service.get("ports"))),
        devices=reserved,
    )
    yield from _container(base, service.get("entrypoint"), service.get("command"), str(service.get("image", "")), file)


def _reserved(service: Mapping[str, Any]) -> tuple[int | None, str]:
    """How many devices a service reserves, and their names where it says them."""
    deploy: Any = service.get("deploy")
    for key in ("resources", "reservations", "devices"):
        deploy = deploy.get(key) if isinstance(deploy, Mapping) else None
    for device in deploy if isinstance(deploy, list) else []:
        if isinstance(device, Mapping):
            if isinstance(device.get("device_ids"), list):
                return len(device["device_ids"]), ",".join(map(str, device["device_ids"]))
            if isinstance(device.get("count"), int):
                return int(device["count"]), ""
    return None, ""


def _ports(ports: Any) -> Iterator[tuple[int, int]]:
    for port in ports if isinstance(ports, list) else []:
        parts = str(port).removesuffix("/tcp").split(":")
        if len(parts) >= 2 and parts[-1].isdigit() and parts[-2].isdigit():
            yield int(parts[-2]), int(parts[-1])


def _role_in(name: str) -> str | None:
    parts = re.split(r"[^a-z]+", name.lower())
    return next((_ROLES[part] for part in parts if part in _ROLES and len(part) > 1), None)


def _container(base: Command, entry: Any, rest: Any, image: str, file: str) -> Iterator[Started]:
    """A container's entry point and arguments; an image of vLLM's with arguments only runs the server."""
    base = replace(base, image=image)
    if isinstance(rest, str) and not isinstance(entry, (str, list)):
        found = list(_started(base, rest, file))
        if found or "vllm" not in image.lower():
            yield from found
            return
        inner = read_script(f"vllm serve {rest}", file, first_line=max(getattr(rest, "line", 1), 1), env=base.env)
        for command in inner:
            yield from unwrap(replace(base, words=command.words, env=command.env, findings=command.findings))
        return
    words = (*_listed(entry), *_listed(rest))
    words = tuple(Word(_kubernetes_variables(word, base.env), word.line) for word in words)
    found = list(unwrap(replace(base, words=words)))
    if not found and "vllm" in image.lower() and words and not entry:
        found = [Serve(replace(base, words=words), "vllm", words)]
    for each in found:
        yield _unfolded(each, (*_texts(entry), *_texts(rest)), file)


def _texts(value: Any) -> list[Text]:
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, Text)]


def _unfolded(started: Started, texts: Sequence[Text], file: str) -> Started:
    """Name a backslash in a folded block, and take it out of the arguments."""
    if not any(text.style == ">" and re.search(r"\\[ \t]+-", text) for text in texts):
        return started
    bad = next((word for word in started.arguments if word.startswith(" ")), Word(" --option"))
    finding = _folded_backslash(file, max((text.line for text in texts if text.style == ">"), default=0), bad.strip())
    command = replace(started.command, findings=(*started.command.findings, finding))
    arguments = tuple(Word(word.strip(), word.line) for word in started.arguments)
    return replace(started, command=command, arguments=arguments)


def _listed(value: Any) -> tuple[Word, ...]:
    if value is None:
        return ()
    if isinstance(value, list):
        return tuple(Word(_scalar(each), getattr(each, "line", 0)) for each in value)
    line = getattr(value, "line", 0)
    if isinstance(value, str) and "\n" not in value.strip() and " " not in value.strip():
        return (Word(value.strip(), line),)
    commands = read_script(str(value), "", first_line=max(line, 1))
    return commands[0].words if commands else ()


def _scalar(value: Any) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


def _kubernetes_variables(text: str, env: Mapping[str, str]) -> str:
    """``$(NAME)``, which Kubernetes replaces in commands and arguments; a text for a shell is left as it is."""
    if " " in text.strip() and "\n" in text:
        return text
    return re.sub(r"\$\(([A-Za-z_]\w*)\)", lambda found: env.get(found[1], UNKNOWN + found[1]), text)


# Kubernetes ---------------------------------------------------------------------------------------------------------


def _objects(document: Mapping[str, Any], file: str) -> Iterator[Started]:
    for container, place, pod in _containers(document, None, 0):
        name = str(container.get("name") or "container")
        owner = _name_of(document) or name
        role = place or _labelled(document) or _role_in(owner) or _role_in(name)
        base = Command(
            words=(),
            env=_environment(container.get("env"), f"{file}: {name}"),
            place=Place(file, getattr(container.get("name"), "line", 0)),
            name=owner if place is None else f"{owner} {place}",
            role=role,
            host=f"pod {owner} {place or ''} {pod}",
            devices=_limits(container),
        )
        yield from _modelled(base, container, document, file)


def _containers(node: Any, role: str | None, depth: int) -> Iterator[tuple[Mapping[str, Any], str | None, int]]:
    """Every container below a node, with the role that a key above it says, and a number of its pod."""
    if depth > 20:
        return
    if isinstance(node, Mapping):
        for key, value in node.items():
            below = _ROLES.get(str(key).lower(), role) if len(str(key)) > 1 else role
            if key == "containers" and isinstance(value, list):
                yield from ((each, role, id(value)) for each in value if isinstance(each, Mapping))
            else:
                yield from _containers(value, below, depth + 1)
    elif isinstance(node, list):
        for each in node:
            named = each.get("name") if isinstance(each, Mapping) else None
            yield from _containers(each, _role_in(str(named)) or role if named else role, depth + 1)


def _modelled(base: Command, container: Mapping[str, Any], document: Mapping[str, Any], file: str) -> Iterator[Started]:
    """llm-d's charts name the model elsewhere (``modelCommand``); other containers hold the whole command."""
    if container.get("modelCommand") in ("vllmServe", "imageDefault"):
        artifacts = document.get("modelArtifacts")
        uri = str(artifacts.get("uri") or artifacts.get("name") or "") if isinstance(artifacts, Mapping) else ""
        model = Word(re.sub(r"^(hf|pvc)://", "", uri) or UNKNOWN + "model")
        words = (model, *_listed(container.get("args")))
        yield Serve(replace(base, words=words), "vllm", words)
        return
    args = container.get("args")
    yield from _container(base, container.get("command"), args, str(container.get("image", "")), file)


def _name_of(document: Mapping[str, Any]) -> str:
    metadata = document.get("metadata")
    return str(metadata.get("name") or "") if isinstance(metadata, Mapping) else ""


def _labelled(document: Any, depth: int = 0) -> str | None:
    """The role that a label such as ``llm-d.ai/role: prefill`` says."""
    if not isinstance(document, Mapping) or depth > 6:
        return None
    labels = document.get("labels")
    if isinstance(labels, Mapping):
        for key, value in labels.items():
            if str(key).rsplit("/", 1)[-1].lower() in ("role", "component", "stage") and str(value).lower() in _ROLES:
                return _ROLES[str(value).lower()]
    return next((found for value in document.values() if (found := _labelled(value, depth + 1))), None)


def _limits(container: Mapping[str, Any]) -> int | None:
    resources = container.get("resources")
    limits = resources.get("limits") or resources.get("requests") if isinstance(resources, Mapping) else None
    for key, value in limits.items() if isinstance(limits, Mapping) else ():
        if re.search(r"gpu|ascend|npu", str(key), re.IGNORECASE) and str(value).isdigit():
            return int(value)
    return None
