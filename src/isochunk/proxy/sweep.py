"""Python's collector of garbage, kept from stopping the proxy."""

from __future__ import annotations

import asyncio
import gc

__all__ = ["sweep"]

_NEVER = 2**31 - 1
_EVERY_S = 600.0


async def sweep() -> None:
    """Look for garbage in all that is there once in ten minutes, for as long as the proxy serves.

    Left to itself Python does so whenever the number of objects has grown by a quarter: with 2,000 streams that takes
    0.2 to 0.3 s in which nobody is answered, and it comes when many clients do. Nothing is lost by waiting: requests
    and connections that end leave nothing behind that only the collector could free (`tests/proxy/test_sweep.py`), and
    young objects are looked through as ever. What is there at the start is never looked at again.
    """
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    gc.collect()
    gc.freeze()
    while True:
        await asyncio.sleep(_EVERY_S)
        gc.collect()
