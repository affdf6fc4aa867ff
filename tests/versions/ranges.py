"""A file on an HTTP server of which only parts are loaded."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

import httpx

__all__ = ["NoRangesError", "Ranges"]

_TAIL = 2 << 20  # where a wheel's directory stands, whole
_GAP = 256 << 10  # less than this between two parts is loaded along with them
_HEADER = 1 << 10  # of a member, before its data


class NoRangesError(Exception):
    """The server sends whole files only, or something else than was asked for."""


class Ranges(io.RawIOBase):
    """The file at this address, for reading; what is read is loaded when it is, or with what `expect` named.

    Raises:
        NoRangesError: the server does not answer to ranges.
        httpx.HTTPError: it does not answer.
    """

    def __init__(self, address: str) -> None:
        super().__init__()
        if urlsplit(address).scheme not in ("http", "https"):
            raise NoRangesError(f"the wheel is at {urlsplit(address).scheme}:")
        self._address = address
        self._client = httpx.Client(follow_redirects=True, timeout=60)
        self._at = 0
        self._expected: list[tuple[int, int]] = []
        self.loaded = 0
        self._size = 0
        self._begin, self._part = self._load(f"-{_TAIL}")

    def expect(self, parts: Sequence[tuple[int, int]]) -> None:
        """These parts (offset, length), in the order of the file, will be read: those close by are loaded together."""
        self._expected = []
        for offset, length in parts:
            end = min(offset + length + _HEADER, self._size)
            if self._expected and offset - self._expected[-1][1] < _GAP:
                self._expected[-1] = (self._expected[-1][0], end)
            else:
                self._expected.append((offset, end))

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As of any file."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        """As of any file."""
        return self._at

    def read(self, size: int = -1) -> bytes:
        """As of any file; as many bytes as asked for, or all that are left."""
        end = self._size if size < 0 else min(self._at + size, self._size)
        if end <= self._at:
            return b""
        if not (self._begin <= self._at and end <= self._begin + len(self._part)):
            around = [part for part in self._expected if part[0] <= self._at and end <= part[1]]
            begin, until = around[0] if around else (self._at, end)
            self._begin, self._part = self._load(f"{begin}-{until - 1}")
        start, self._at = self._at - self._begin, end
        return self._part[start : end - self._begin]

    def close(self) -> None:
        """Close the connection."""
        self._client.close()
        super().close()

    def _load(self, part: str) -> tuple[int, bytes]:
        """Where this range begins, and its bytes."""
        # Asked for as a stream, so that of a server that sends the whole file only the header is read.
        with self._client.stream("GET", self._address, headers={"Range": f"bytes={part}"}) as answer:
            place = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", answer.headers.get("content-range", ""))
            if answer.status_code != httpx.codes.PARTIAL_CONTENT or place is None:
                raise NoRangesError(f"the server answers {answer.status_code} when asked for a part")
            data = answer.read()
        begin, last, self._size = map(int, place.groups())
        if len(data) != last + 1 - begin:
            raise NoRangesError("the server sends another part than it says")
        self.loaded += len(data)
        return begin, data
