"""The versions of vLLM that isochunk is made for: declared here, and nowhere else. Imports no vLLM."""

from __future__ import annotations

import re

__all__ = ["NEWEST", "OLDEST", "minor", "supported", "unknown"]

OLDEST = (0, 23)
NEWEST = (0, 33)
_CHECKOUTS = ("0.0.", "0.1.dev")  # as builds name themselves where no tag is in sight


def minor(version: str) -> tuple[int, int] | None:
    """(0, 32) of "0.32.1+cpu", (1, 0) of "1.0rc1"; None of what is no release (a build from a checkout)."""
    found = re.match(r"v?(\d+)\.(\d+)", version)
    if found is None or version.startswith(_CHECKOUTS):
        return None
    return int(found[1]), int(found[2])


def supported() -> str:
    """The range, as people read it."""
    return f"vLLM {_name(OLDEST)} to {_name(NEWEST)}"


def unknown(version: str) -> str | None:
    """Why this version of vLLM is none of those that were tried; None when it is one."""
    of = minor(version)
    if of is None:
        return f"vLLM {version} names no release; isochunk was tried with {supported()}"
    if of > NEWEST:
        return f"vLLM {version} is newer than isochunk knows ({supported()}); every name that it needs is there"
    if of < OLDEST:
        return f"vLLM {version} is older than isochunk was tried with ({supported()})"
    return None


def _name(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
