"""A way to the virtual stages that goes past the engine, which waits for them while a stage stands still."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from isochunk.core.errors import ServerError

__all__ = ["Channel", "tell"]

_PATIENCE_S = 10.0
_PEER = struct.Struct("3i")  # process, user and group, as Linux gives them


class Channel:
    """Answers what `tell` says, in a thread of its own and to this user's processes only.

    Args:
        name: of the socket, one of Linux' abstract names.
        answer: gets and returns plain data; its errors go back as ``{"error": text}``.
    """

    def __init__(self, name: str, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._answer = answer
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{name}")
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, name="isochunk-channel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more."""
        with suppress(OSError):  # closed before
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, suppress(OSError):  # whoever hangs up is not answered
                connection.settimeout(_PATIENCE_S)
                peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
                if _PEER.unpack(peer)[1] == os.getuid():
                    connection.sendall(json.dumps(self._answered(_all(connection))).encode())

    def _answered(self, said: bytes) -> dict[str, Any]:
        try:
            return self._answer(json.loads(said))
        except Exception as error:  # noqa: BLE001 - the one who asked is told, whatever it is
            return {"error": str(error)}


def tell(name: str, data: dict[str, Any]) -> dict[str, Any]:
    """Send plain data to the channel of this name; its answer.

    Raises:
        ServerError: nobody answers there.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.settimeout(_PATIENCE_S)
            connection.connect(f"\0{name}")
            connection.sendall(json.dumps(data).encode())
            connection.shutdown(socket.SHUT_WR)
            return dict(json.loads(_all(connection)))
        except (OSError, ValueError) as error:
            raise ServerError(f"the virtual stages don't answer: {error}") from error


def _all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65_536):
        parts.append(part)
    return b"".join(parts)
