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
        error = {"message": str(self), "type": self.kind, "param": None, "code": self.status}
        return json.dumps({"error": error}).encode()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers that go with the body."""
        headers = [(b"content-type", b"application/json")]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        return headers


class NodeFailedError(ProxyError):
    """A node did not answer as it should, and the client has seen nothing yet: another one may be tried."""

    def __init__(self, node: str, what: str, *, status: int = 502) -> None:
        super().__init__(status, "upstream_error", f"node {node} {what}")
        self.node = node


class NodeUnreachableError(NodeFailedError):
    """A node could not be connected to, so it has seen nothing of the request."""


class ExhaustedError(ProxyError):
    """The proxy itself is out of descriptors or memory; no node is to blame."""

    def __init__(self) -> None:
        super().__init__(503, "overloaded", "the proxy has no descriptors left", retry_after_s=2)


class ClientGoneError(IsochunkError):
    """The client closed its connection; nobody is left to answer."""


class NodeRefusedError(ProxyError):
    """A node found fault with the request: its answer goes to the client as it is, and no other node is tried.

    Args:
        headers: of the node's answer, without those that concern one connection only.
    """

    def __init__(self, node: str, status: int, headers: list[tuple[bytes, bytes]], data: bytes) -> None:
        super().__init__(status, "refused", f"node {node} answered {status}")
        self._headers = headers
        self._data = data

    def body(self) -> bytes:
        """The node's answer."""
        return self._data

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The node's headers."""
        return self._headers
