"""A way to the virtual stages that goes past the engine, which waits for them while a stage stands still."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Listener
from typing import Any

from isochunk.core.errors import ServerError

__all__ = ["Channel", "tell"]


class Channel:
    """Answers what `tell` says, in a thread of its own; on a socket that only this user's processes can open.

    Args:
        name: of the socket (Linux' abstract names), and its key.
        answer: gets and returns plain data; its errors go back as ``{"error": text}``.
    """

    def __init__(self, name: str, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._name = name
        self._answer = answer
        self._open = True
        self._listener = Listener(_address(name), "AF_UNIX", authkey=name.encode())
        self._thread = threading.Thread(target=self._serve, name="isochunk-channel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more."""
        if self._open:
            self._open = False
            tell(self._name, {})  # wakes the thread
            self._thread.join()
            self._listener.close()

    def _serve(self) -> None:
        while self._open:
            try:
                with self._listener.accept() as connection:
                    connection.send_bytes(json.dumps(self._answered(json.loads(connection.recv_bytes()))).encode())
            except Exception:  # noqa: BLE001 - whoever knocks with a wrong key or hangs up must not end the thread
                continue

    def _answered(self, data: dict[str, Any]) -> dict[str, Any]:
        if not self._open:
            return {}
        try:
            return self._answer(data)
        except Exception as error:  # noqa: BLE001 - the one who asked is told, whatever it is
            return {"error": str(error)}


def tell(name: str, data: dict[str, Any]) -> dict[str, Any]:
    """Send plain data to the channel of this name; its answer.

    Raises:
        ServerError: nobody listens there.
    """
    try:
        with Client(_address(name), "AF_UNIX", authkey=name.encode()) as connection:
            connection.send_bytes(json.dumps(data).encode())
            return dict(json.loads(connection.recv_bytes()))
    except (OSError, EOFError) as error:
        raise ServerError(f"the virtual stages don't answer: {error}") from error


def _address(name: str) -> str:
    return f"\0{name}"
