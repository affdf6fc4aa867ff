"""``/isochunk/rehearsal``: how the virtual stages are, and trouble at run time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from isochunk.core.errors import ServerError
from isochunk.vllm.virtual.channel import tell

__all__ = ["rehearsal_routes"]


def rehearsal_routes(channel: str, authorise: Callable[[Request], None]) -> APIRouter:
    """``GET`` tells how the stages are; ``POST`` takes one trouble, such as ``{"kind": "slow", "factor": 3}``."""
    router = APIRouter(prefix="/isochunk", tags=["isochunk"])

    async def answer(data: dict[str, Any]) -> JSONResponse:
        try:
            told = await asyncio.to_thread(tell, channel, data)
        except ServerError as error:
            return JSONResponse({"error": str(error)}, status_code=503)
        return JSONResponse(told, status_code=400 if "error" in told else 200)

    @router.get("/rehearsal")
    async def status(request: Request) -> JSONResponse:
        authorise(request)
        return await answer({})

    @router.post("/rehearsal")
    async def trouble(request: Request) -> JSONResponse:
        authorise(request)
        try:
            data = json.loads(await request.body())
        except ValueError as error:
            return JSONResponse({"error": f"the body is not JSON: {error}"}, status_code=400)
        if not isinstance(data, dict) or not data:
            return JSONResponse({"error": "the body must be an object with a kind"}, status_code=400)
        return await answer(data)

    return router
