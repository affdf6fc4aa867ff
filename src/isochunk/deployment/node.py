"""A vLLM server as its options resolve, and a deployment of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from isochunk.deployment.command import Place, Word
from isochunk.deployment.finding import Finding
from isochunk.deployment.model_shape import ModelShape

__all__ = ["Connector", "Deployment", "Front", "Node"]


@dataclass(frozen=True, slots=True)
class Connector:
    """One KV connector of a node: the node's own, or one inside its MultiConnector."""

    name: str
    config: Mapping[str, Any]
    inner: bool = False

    @property
    def extra(self) -> Mapping[str, Any]:
        """Its ``kv_connector_extra_config``."""
        value = self.config.get("kv_connector_extra_config")
        return value if isinstance(value, Mapping) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One vLLM server.

    Attributes:
        name: what messages call it.
        role: ``prefill``, ``decode``, or None when nothing says it.
        image: the container's image; ``contained``: it is a container on the machine of the others of its file.
        foreground: whether its script waits for its end before it goes on.
        program: ``vllm`` or ``isochunk``; ``module``: started with Python's ``-m`` of the API server.
        model: what it serves; None when the command does not say it.
        given: the options that were given, by vLLM's names, as vLLM reads them.
        defaults: vLLM's defaults by the same names.
        unknown: options whose value only the shell that runs it knows.
        whole: False when there may be options that nobody can see here, such as ``"$@"``.
        lines: where each option stands.
        env: its environment.
        host: where it runs; nodes on one host must not share ports. None: not said, so the same for all.
        published: pairs of a host's port and the container's port that it leads to.
        devices: accelerators that it is given, when something says it; ``clustered``: it takes other machines' too.
        shape: what is known of its model.
        reading: what was found while it was read.
        words: its arguments, as they go to vLLM's parser.
        plans: whether isochunk is on; None when that can't be known here.
        min_chunk: of isochunk's section.
        section_fault: why isochunk's section can't be read.
    """

    name: str
    role: str | None
    program: str
    model: str | None
    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    place: Place
    module: bool = False
    unknown: frozenset[str] = frozenset()
    whole: bool = True
    lines: Mapping[str, Place] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    host: str | None = None
    published: tuple[tuple[int, int], ...] = ()
    devices: int | None = None
    clustered: bool = False
    foreground: bool = False
    image: str = ""
    contained: bool = False
    device_gib: float | None = None
    shape: ModelShape = field(default_factory=ModelShape)
    reading: tuple[Finding, ...] = ()
    words: tuple[str, ...] = ()
    plans: bool | None = False
    min_chunk: int | None = None
    section_fault: str = ""

    def get(self, option: str) -> Any:
        """An option's value as given, else vLLM's default; None also when nobody can know it here."""
        if option in self.unknown:
            return None
        return self.given.get(option, self.defaults.get(option))

    def number(self, option: str) -> int | None:
        """A whole number, or None."""
        value = self.get(option)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def size(self, kind: str) -> int | None:
        """Parallel size: ``pipeline``, ``tensor``, ``data``, ``prefill_context``; None when it is not written down."""
        name = f"{kind}_size" if kind == "prefill_context_parallel" else f"{kind}_parallel_size"
        return None if name in self.unknown else (self.number(name) or 1)

    @property
    def kv(self) -> Mapping[str, Any]:
        """Its ``--kv-transfer-config``."""
        value = self.get("kv_transfer_config")
        return value if isinstance(value, Mapping) else {}

    @property
    def connectors(self) -> tuple[Connector, ...]:
        """Its connector, or those inside its MultiConnector."""
        name = self.kv.get("kv_connector")
        if not isinstance(name, str):
            return ()
        own = Connector(name, self.kv)
        inside = own.extra.get("connectors")
        if name != "MultiConnector":
            return (own,)
        if not isinstance(inside, list):
            return ()
        return tuple(
            Connector(str(each.get("kv_connector")), each, inner=True) for each in inside if isinstance(each, Mapping)
        )

    @property
    def port(self) -> int | None:
        """Where its API listens; None when that is not written down, or it has no API."""
        return None if self.headless else self.number("port")

    @property
    def headless(self) -> bool:
        """One of several commands of a node: it has no API of its own."""
        return bool(self.given.get("headless")) and not self.module

    def env_number(self, name: str, default: int) -> int | None:
        """A variable's whole number; None when it is none."""
        text = self.env.get(name, str(default)).strip()
        return int(text) if text.isdigit() else None


@dataclass(frozen=True, slots=True)
class Front:
    """What stands before the nodes.

    Attributes:
        program: what it is called, such as ``isochunk`` or ``toy_proxy_server.py``.
        options: its options without dashes, each with all its values.
        place: where it stands.
        prefill, decode: pairs of host and port that it is told; None when it is told them elsewhere.
    """

    program: str
    options: Mapping[str, tuple[Word, ...]]
    place: Place
    prefill: tuple[tuple[str, int | None], ...] | None = None
    decode: tuple[tuple[str, int | None], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Nodes and what stands before them."""

    nodes: tuple[Node, ...]
    fronts: tuple[Front, ...] = ()
    vllm: str = ""

    def role(self, role: str) -> tuple[Node, ...]:
        """The nodes of one role that have an API: not further commands of one over several machines."""
        return tuple(
            node for node in self.nodes if node.role == role and not node.headless and not node.get("node_rank")
        )

    def pairs(self) -> Iterator[tuple[Node, Node]]:
        """Every P node with every D node."""
        for prefill in self.role("prefill"):
            for decode in self.role("decode"):
                yield prefill, decode
