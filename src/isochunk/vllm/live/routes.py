"""The page and what it asks for: ``GET /isochunk``, ``/isochunk/view``, ``/isochunk/plan``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from isochunk.core.errors import IsochunkError
from isochunk.vllm.live.explain import explain, words
from isochunk.vllm.live.view import view

__all__ = ["Call", "live_routes", "plain_json"]

Call = Callable[..., Awaitable[dict[str, Any]]]
_KINDS = {"page.css": "text/css", "page.js": "text/javascript"}


def live_routes(call: Call) -> APIRouter:
    """Routes that show what ``call(request, "isochunk_status")`` answers.

    The page itself holds no data and asks for the server's key where it has one, so it is served without.
    """
    router = APIRouter(prefix="/isochunk", tags=["isochunk"])

    @router.get("", response_class=HTMLResponse)
    async def page() -> str:
        return _read("page.html")

    @router.get("/page.{kind}")
    async def part(kind: str) -> Response:
        name = f"page.{kind}"
        if name not in _KINDS:
            return JSONResponse({"error": f"no such file: {name}"}, 404)
        return Response(_read(name), media_type=_KINDS[name])

    @router.get("/view")
    async def numbers(request: Request) -> Response:
        status = await call(request, "isochunk_status")
        return plain_json({**view(status), "status": status})

    @router.get("/plan")
    async def planned(
        request: Request, tokens: Annotated[int, Query()], cached: Annotated[int, Query()] = 0
    ) -> JSONResponse:
        status = await call(request, "isochunk_status")
        try:
            told = explain(status, tokens, cached)
        except IsochunkError as error:
            return JSONResponse({"error": str(error)}, 400)
        return JSONResponse({**told.as_dict(), "words": words(told)})

    return router


def plain_json(told: Any) -> Response:
    """An answer of any length: ten thousand steps take the standard library a tenth of a second."""
    return Response(msgspec.json.encode(told), media_type="application/json")


def _read(name: str) -> str:
    return (files("isochunk.vllm.live") / name).read_text(encoding="utf-8")
