"""vLLM's ``endpoint_plugins`` entry point: the status and policy routes of the API server.

vLLM loads it when ``VLLM_PLUGINS`` names ``isochunk``; ``isochunk serve`` sets that.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError

from isochunk.core.planner import Policy
from isochunk.vllm import compat
from isochunk.vllm.live.metrics import add_metrics
from isochunk.vllm.live.routes import live_routes, plain_json
from isochunk.vllm.virtual.rehearsal import rehearsal_of
from isochunk.vllm.virtual.routes import rehearsal_routes

__all__ = ["OPEN", "IsochunkEndpoint"]

OPEN = "ISOCHUNK_OPEN_POLICY"  # 1 in the environment of a server without a key: anybody may change its policy

router = APIRouter(prefix="/isochunk", tags=["isochunk"])


class PolicyChange(BaseModel):
    """Body of ``POST /isochunk/policy``."""

    model_config = ConfigDict(extra="forbid")

    policy: Policy
    chunk: Annotated[StrictInt, Field(ge=1)] | None = None


class IsochunkEndpoint:
    """Adds the routes of `/isochunk/` (status, health, policy), behind the server's API key if it has one."""

    name = "isochunk"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Register the routes."""
        app.include_router(router)
        app.include_router(live_routes(_told))
        add_metrics(app, lambda: _engine(app.state, "isochunk_totals"))
        if (rehearsal := rehearsal_of(os.environ)) is not None:
            app.include_router(rehearsal_routes(rehearsal.channel, authorise))

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Nothing to do: vLLM itself keeps the way to the engine and its arguments there."""


def _keys(request: Request) -> list[str]:
    return [key for key in (request.app.state.args.api_key or [os.environ.get("VLLM_API_KEY")]) if key]


def authorise(request: Request) -> None:
    """Raise `HTTPException` unless the request carries one of the server's keys, if it has any."""
    keys = _keys(request)
    if keys and not compat.token_is_valid(request.headers, keys):
        raise HTTPException(401, "Unauthorized: send the server's API key as 'Authorization: Bearer KEY'")


async def _engine(state: Any, method: str, *args: Any) -> dict[str, Any]:
    return dict(await state.engine_client.engine_core.call_utility_async(method, *args))


def _may_change(request: Request) -> None:
    """Raise `HTTPException` where everybody could change the policy and nobody said that they may."""
    if not _keys(request) and os.environ.get(OPEN) != "1":
        raise HTTPException(
            403, f"this server has no API key, so anybody could change its policy: give it one, or set {OPEN}=1"
        )


def _shown(record: dict[str, Any], own: list[str]) -> dict[str, Any]:
    """A prompt's record, with its request's id only for whoever knows it.

    To what a client sent the proxy adds a suffix and the number of the try; vLLM adds a kind before it, and behind it
    the number of the prompt and a suffix of its own.
    """
    known = any(
        re.fullmatch(
            rf"([a-z]+-)?{re.escape(name)}(-[0-9a-f]{{12}})?(-\d+){{0,2}}(-[0-9a-f]{{8}})?", record["request_id"]
        )
        for name in own
    )
    return record if known else {**record, "request_id": None}


async def _call(request: Request, method: str, *args: Any) -> dict[str, Any]:
    authorise(request)
    try:
        return await _engine(request.app.state, method, *args)
    except Exception as error:  # vLLM reports what failed in the engine as a plain Exception
        if "has no attribute" in str(error):
            raise HTTPException(
                404, "isochunk does not schedule on this server: set profiling_chunk_config.enabled"
            ) from error
        raise HTTPException(503, f"the engine did not answer: {error}") from error


async def _told(request: Request, method: str, *args: Any) -> dict[str, Any]:
    """As `_call`, of a status: prompts without the ids of whoever did not name them."""
    told = await _call(request, method, *args)
    own = request.query_params.getlist("request_id")
    return {**told, "prompts": [_shown(record, own) for record in told["prompts"]]}


@router.get("/status")
async def status(request: Request) -> Response:
    """Policy, model, last plans with predicted and measured step times, counters.

    Prompts are told without their ids, but for those that ``?request_id=`` names (it may be given more than once).
    """
    return plain_json(await _told(request, "isochunk_status"))


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """200 while steps are planned; 503 when so many failed in a row that nothing is, with the last error."""
    told = (await _call(request, "isochunk_status"))["health"]
    return JSONResponse(told, status_code=200 if told["ok"] else 503)


@router.post("/policy")
async def policy(request: Request) -> JSONResponse:
    """Change policy and fixed size at run time."""
    authorise(request)
    _may_change(request)
    try:
        change = PolicyChange.model_validate_json(await request.body())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "body"
        return JSONResponse({"error": f"{where}: {first['msg']}"}, status_code=400)
    result = await _call(request, "isochunk_policy", change.policy, change.chunk)
    return JSONResponse(result, status_code=400 if "error" in result else 200)
