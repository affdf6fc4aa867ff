"""What the proxy answers when it can't hand on a node's answer."""

from __future__ import annotations

import json

from isochunk.core.errors import IsochunkError

__all__ = [
    "ClientGoneError",
    "ExhaustedError",
    "NodeFailedError",
    "NodeRefusedError",
    "NodeUnreachableError",
    "ProxyError",
]


class ProxyError(IsochunkError):
    """An error the client gets, as the error object that OpenAI's clients understand.

    Args:
        status: HTTP status.
        kind: the object's ``type``.
        retry_after_s: whole seconds for the ``Retry-After`` header.
    """

    def __init__(self, status: int, kind: str, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The error object in JSON."""
        return _object(str(self), self.kind, self.status)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers that go with the body."""
        headers = [(b"content-type", b"application/json")]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        return headers


def _object(message: str, kind: str, status: int) -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()


class NodeFailedError(ProxyError):
    """A node did not answer as it should, and the client has seen nothing of it yet: another one may be tried.

    Args:
        node: its name, for the log; the client is told no addresses.
        role: prefill or decode.
        what: it did, for the log.
        public: the same for the client; None when ``what`` holds no address.
        broke: the connection ended in the middle, so that the request may have killed the node.
        answered: the node said so itself and did not compute.
    """

    def __init__(
        self,
        node: str,
        role: str,
        what: str,
        *,
        status: int = 502,
        public: str | None = None,
        broke: bool = False,
        answered: bool = False,
    ) -> None:
        super().__init__(status, "upstream_error", f"{role} node {node} {what}")
        self.node = node
        self.public = f"a {role} node {what if public is None else public}"
        self.broke = broke
        self.answered = answered

    @property
    def untouched(self) -> bool:
        """The node has seen nothing of the request."""
        return False

    def body(self) -> bytes:
        """Without the node's address."""
        return _object(self.public, self.kind, self.status)


class NodeUnreachableError(NodeFailedError):
    """A node could not be connected to, so it has seen nothing of the request."""

    @property
    def untouched(self) -> bool:
        """It has not."""
        return True


class StreamError(IsochunkError):
    """A stream is not what it should be."""


class RecomputedError(IsochunkError):
    """A D node has dropped a request in the middle and asks for it again, with what was said so far."""


class ExhaustedError(ProxyError):
    """The proxy itself is out of descriptors or memory; no node is to blame."""

    def __init__(self) -> None:
        super().__init__(503, "overloaded", "the proxy has no descriptors left", retry_after_s=2)


class ClientGoneError(IsochunkError):
    """The client closed its connection; nobody is left to answer."""


class NodeRefusedError(ProxyError):
    """A node found fault with the request: unless another accepts it, its answer goes to the client as it is.

    Args:
        headers: of the node's answer, without those that concern one connection only.
    """

    def __init__(self, node: str, status: int, headers: list[tuple[bytes, bytes]], data: bytes) -> None:
        super().__init__(status, "refused", f"node {node} answered {status}")
        self.node = node
        self._headers = headers
        self._data = data

    @property
    def elsewhere(self) -> bool:
        """Another node may think otherwise: it is about keys, models and load, not about the request."""
        return self.status in (401, 403, 404, 429)

    def body(self) -> bytes:
        """The node's answer."""
        return self._data

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The node's headers."""
        return self._headers
