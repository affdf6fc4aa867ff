"""From commands to a deployment: the arguments of each node as vLLM reads them, and who is P and who is D."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from isochunk.core.errors import ConfigError
from isochunk.deployment.before_parsing import known, model_in_front, with_file, without_blanks, without_unknown
from isochunk.deployment.documents import Started
from isochunk.deployment.draft import Draft
from isochunk.deployment.front import read_front, with_roles
from isochunk.deployment.given_options import options_of
from isochunk.deployment.model_shape import read_shape
from isochunk.deployment.node import Deployment, Node
from isochunk.deployment.option_table import defaults
from isochunk.deployment.refusals import Parser, parse
from isochunk.deployment.wrappers import Serve

__all__ = ["Parser", "ReadSection", "Section", "read_deployment"]


class Section(Protocol):
    """isochunk's section of ``--additional-config``, read."""

    @property
    def enabled(self) -> bool:
        """Whether it switches isochunk on."""
        ...

    @property
    def planner(self) -> str:
        """Who plans where it is on: ``isochunk``, or another to whom it leaves the section."""
        ...

    @property
    def min_chunk(self) -> int | None:
        """Floor of a chunk."""
        ...


ReadSection = Callable[[Any], Section]


def read_deployment(
    started: Iterable[Started],
    parser: Parser,
    section: ReadSection,
    *,
    near: Path = Path(),
    say: Callable[[str], None] = lambda text: None,
) -> Deployment:
    """All nodes and proxies, with their roles.

    Args:
        section: reads isochunk's section of an ``--additional-config``; raises ConfigError.
        near: folder from which relative paths count.
        say: told which node is being read.

    Raises:
        ConfigError: a model's configuration can't be read.
    """
    nodes: list[Node] = []
    fronts = []
    for index, each in enumerate(started):
        if isinstance(each, Serve):
            say(f"reading node {index + 1}")
            nodes.append(_node(each, parser, section, near, f"node {len(nodes) + 1}"))
        else:
            fronts.append(read_front(each))
    named = with_roles(nodes, fronts)
    return Deployment(nodes=tuple(_distinct(named)), fronts=tuple(fronts), vllm=parser.vllm)


def _distinct(nodes: Sequence[Node]) -> Iterator[Node]:
    """Nodes whose names are all different."""
    seen: dict[str, int] = {}
    for node in nodes:
        seen[node.name] = seen.get(node.name, 0) + 1
        name = node.name if seen[node.name] == 1 else f"{node.name} ({seen[node.name]})"
        yield replace(node, name=name, reading=tuple(finding.of(name) for finding in node.reading))


def _node(serve: Serve, parser: Parser, section: ReadSection, near: Path, name: str) -> Node:
    command = serve.command
    draft = Draft(serve, near, parser.vllm, [*command.findings])
    words = without_blanks(draft, with_file(draft, list(serve.arguments)))
    lines = {option.dest: draft.place(words[option.begin]) for option in options_of(words)}
    told, words = model_in_front(without_unknown(draft, words))
    given, words = parse(draft, parser, words)
    if told and serve.module:
        given["model"] = given.pop("model_tag", told)
    given = {key: known(value) for key, value in given.items()}
    model = _model(serve, given)
    planning = _planning(draft, section, given)
    return Node(
        name=command.name or name,
        role=command.role or _role(given),
        program=serve.program,
        module=serve.module,
        model=model,
        given=given,
        defaults=defaults(),
        unknown=frozenset(draft.unknown),
        whole=draft.whole,
        lines=lines,
        env=command.env,
        host=command.host,
        published=command.published,
        devices=command.devices,
        clustered=command.clustered,
        foreground=command.foreground,
        image=command.image,
        contained=command.contained,
        device_gib=command.device_gib,
        place=command.place,
        shape=read_shape(model, command.model_config, given.get("hf_overrides"), near),
        reading=tuple(draft.findings),
        words=tuple(map(str, words)),
        **planning,
    )


def _planning(draft: Draft, read: ReadSection, given: Mapping[str, Any]) -> dict[str, Any]:
    """Whether isochunk is on, as its own reader of the section says."""
    if "additional_config" in draft.unknown:
        return {"plans": None}
    config = given.get("additional_config")
    if config is not None and not isinstance(config, Mapping):
        draft.find(
            "not-json",
            f"--additional-config {config} is no object of JSON",
            "nobody finds a section in it",
            "write '{\"...\": ...}'",
            option="--additional-config",
        )
        return {"plans": None}
    try:
        section = read(config)
    except ConfigError as fault:
        return {"plans": None, "section_fault": str(fault)}
    named = str(given.get("scheduler_cls") or "").startswith("isochunk.")
    on = section.enabled or named or (draft.serve.program == "isochunk" and not _says_off(config))
    on = on and section.planner == "isochunk"
    return {"plans": on or (False if draft.whole else None), "min_chunk": section.min_chunk if on else None}


def _model(serve: Serve, given: Mapping[str, Any]) -> str | None:
    tag = None if serve.module else given.get("model_tag")
    model = tag if tag is not None else given.get("model")
    return model if isinstance(model, str) else None


def _says_off(config: Any) -> bool:
    """Whether a section says by itself that isochunk is off, which ``isochunk serve`` respects."""
    section = config
    for key in ("scheduler_config", "profiling_chunk_config", "enabled"):
        section = section.get(key) if isinstance(section, Mapping) else None
    return section is False


def _role(given: Mapping[str, Any]) -> str | None:
    config = given.get("kv_transfer_config")
    role = config.get("kv_role") if isinstance(config, Mapping) else None
    inner = config.get("kv_connector_extra_config") if isinstance(config, Mapping) else None
    roles = {role}
    if isinstance(inner, Mapping) and isinstance(inner.get("connectors"), list):
        roles |= {each.get("kv_role") for each in inner["connectors"] if isinstance(each, Mapping)}
    found = {"prefill" for each in roles if each == "kv_producer"} | {
        "decode" for each in roles if each == "kv_consumer"
    }
    return found.pop() if len(found) == 1 else None
