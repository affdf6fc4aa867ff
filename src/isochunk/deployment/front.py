"""Proxies and routers: what they are told of the nodes, and the roles that follow from it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from isochunk.deployment.command import Word, is_unknown
from isochunk.deployment.node import Front, Node
from isochunk.deployment.wrappers import Proxy

__all__ = ["LOOPBACK", "reaches", "read_front", "with_roles"]

LOOPBACK = frozenset(("localhost", "127.0.0.1", "::1", "0.0.0.0"))

_HOSTS = {
    "prefill": ("prefiller-hosts", "prefiller-host", "prefill-hosts", "prefill-host"),
    "decode": ("decoder-hosts", "decoder-host", "decode-hosts", "decode-host"),
}
_PORTS = {
    "prefill": ("prefiller-ports", "prefiller-port", "prefill-ports", "prefill-port"),
    "decode": ("decoder-ports", "decoder-port", "decode-ports", "decode-port"),
}
_ADDRESSES = {
    "prefill": ("prefill", "prefiller", "prefill-url", "prefill-urls", "prefill-instances", "prefiller-url"),
    "decode": ("decode", "decoder", "decode-url", "decode-urls", "decode-instances", "decoder-url"),
}

Address = tuple[str, int | None]


def read_front(proxy: Proxy) -> Front:
    """A proxy's options, and the nodes that they name."""
    options = _options(proxy.arguments)
    elsewhere = any(name in options for name in ("nodes", "config", "service-discovery", "static-backends"))
    told = {role: None if elsewhere else _told(options, role) for role in ("prefill", "decode")}
    return Front(proxy.program, options, proxy.command.place, prefill=told["prefill"], decode=told["decode"])


def _options(words: Sequence[Word]) -> dict[str, tuple[Word, ...]]:
    """Options with all their values; one that stands several times has the values of all."""
    options: dict[str, tuple[Word, ...]] = {}
    key = ""
    for word in words:
        if word.startswith("-") and not re.fullmatch(r"-\d+", word):
            name, equals, value = word.partition("=")
            key = name.lstrip("-").replace("_", "-")
            options[key] = (*options.get(key, ()), *([Word(value, word.line)] if equals else []))
        else:
            options[key] = (*options.get(key, ()), word)
    return options


def _told(options: dict[str, tuple[Word, ...]], role: str) -> tuple[Address, ...] | None:
    addresses = [part for name in _ADDRESSES[role] for word in options.get(name, ()) for part in word.split(",")]
    made = [address for part in addresses if (address := _address(part)) is not None]
    if made:
        return tuple(made)
    ports = [part for name in _PORTS[role] for word in options.get(name, ()) for part in word.split(",") if part]
    hosts = [part for name in _HOSTS[role] for word in options.get(name, ()) for part in word.split(",") if part]
    if not ports and not hosts:
        return (
            None
            if not any(name in options for names in (_PORTS, _HOSTS, _ADDRESSES) for n in names.values() for name in n)
            else ()
        )
    hosts = hosts or ["localhost"] * len(ports)
    if len(hosts) == 1:
        hosts = hosts * len(ports)
    numbers = [int(port) if port.isdigit() else None for port in ports] or [8000] * len(hosts)
    return tuple(zip(hosts, numbers, strict=False))


def _address(text: str) -> Address | None:
    """Host and port of ``http://host:port`` or ``[v6]:port``; None for a bare number (a bootstrap port)."""
    if text.isdigit():
        return None
    text = re.sub(r"^\w+://", "", text).split("/")[0]
    found = re.fullmatch(r"(.+?):(\d+)", text)
    if found:
        return found[1].strip("[]"), int(found[2])
    return (text.rpartition(":")[0] if is_unknown(text) else text, None) if text else None


def with_roles(nodes: Sequence[Node], fronts: Sequence[Front]) -> list[Node]:
    """The nodes with the roles that a proxy's addresses give to those that say none themselves.

    Where only one role is left over, those that no address reaches have it: the address is then wrong, not the node.
    """
    found = [node if node.role else replace(node, role=_role(node, fronts)) for node in nodes]
    told = {role for front in fronts for role in ("prefill", "decode") if getattr(front, role)}
    missing = told - {node.role for node in found}
    if len(missing) != 1:
        return found
    role = missing.pop()
    return [node if node.role else replace(node, role=role) for node in found]


def _role(node: Node, fronts: Sequence[Front]) -> str | None:
    found = set()
    for front in fronts:
        for role, told in (("prefill", front.prefill), ("decode", front.decode)):
            if any(reaches(address, node) for address in told or ()):
                found.add(role)
    return found.pop() if len(found) == 1 else None


def reaches(address: Address, node: Node) -> bool:
    """Whether an address that a proxy is told can be a node's; what is not written down can be anything."""
    host, port = address
    ports = set(api_ports(node))
    if port is not None and ports and port not in ports:
        return False
    return same_host(host, node)


def api_ports(node: Node) -> Iterator[int]:
    """Ports under which a node's API is found from outside."""
    if node.port is None:
        return
    published = [outside for outside, inside in node.published if inside == node.port]
    yield from published
    yield node.port


def same_host(host: str, node: Node) -> bool:
    """Whether a name can mean the machine of a node."""
    if is_unknown(host):
        return True
    own = [node.host, node.get("host"), node.env.get("VLLM_HOST_IP"), node.env.get("VLLM_NIXL_SIDE_CHANNEL_HOST")]
    names = {name for name in own if isinstance(name, str) and name not in ("0.0.0.0", "::", "")}
    if host in names or not names or any(is_unknown(name) for name in names):
        return True
    if host in LOOPBACK:
        return (
            node.host is None
            or bool(node.published)
            or node.host in LOOPBACK
            or node.host.startswith(("file ", "pod "))
        )
    # A name can be any address, and ours for containers, pods and files (with a blank) can be any name.
    comparable = {name for name in names - LOOPBACK if _is_ip(name) == _is_ip(host) and " " not in name}
    if not _is_ip(host) and host.split(".", maxsplit=1)[0] in {name.split(".")[0] for name in comparable}:
        return True  # a name with and without its domain
    return not comparable and bool(names - LOOPBACK)


def _is_ip(text: str) -> bool:
    return bool(re.fullmatch(r"\d+\.\d+\.\d+\.\d+", text))
