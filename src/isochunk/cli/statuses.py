"""A server's status, asked for or read from a file, and looked at before anything is made of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from isochunk.bench.client import Server
from isochunk.core.cost import CostModel
from isochunk.core.errors import ConfigError, ModelError, ServerError
from isochunk.core.planner import MAX_STAGES

__all__ = ["Status", "ask_status", "read_status"]

Status = Mapping[str, Any]

_PATIENCE_S = 60.0  # an engine answers between two steps
_STEPS = ("chunks", "histories", "predicted_s", "measured_s", "entered_s", "exited_s")

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Moment = Annotated[float, Field(ge=-1e12, le=1e12)]


class _Looked(BaseModel):
    """Other fields, of newer versions, are kept as they are."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class _Prompt(_Looked):
    request_id: str | None = None
    policy: str
    tokens: Annotated[int, Field(ge=1)]
    cached: Count
    alone: bool
    predicted_ttft_s: Seconds | None
    measured_ttft_s: Seconds
    chunks: list[Annotated[int, Field(ge=1)]]
    histories: list[Count]
    predicted_s: list[Seconds]
    measured_s: list[Seconds]
    entered_s: list[Moment]
    exited_s: list[Moment]

    @model_validator(mode="after")
    def _one_entry_a_step(self) -> Self:
        for name in _STEPS[1:]:
            if len(getattr(self, name)) != len(self.chunks):
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {len(self.chunks)} chunks")
        return self


class _Status(_Looked):
    version: str = "unknown"
    policy: str = "unknown"
    stages: Annotated[int, Field(ge=1, le=MAX_STAGES)]
    max_num_batched_tokens: Annotated[int, Field(ge=1)]
    alignment: Annotated[int, Field(ge=1)] = 1
    model: dict[str, Any] | None
    counters: dict[str, int] = {}
    queue: dict[str, int] = {}
    prompts: list[_Prompt]

    @model_validator(mode="after")
    def _its_model_is_one(self) -> Self:
        if self.model is not None:
            try:
                self.model = CostModel.of(self.model).as_dict()
            except (ModelError, TypeError, ValueError) as error:
                raise ValueError(f"model: {error}") from None
        return self


def ask_status(url: str, api_key: str | None) -> Status:
    """What a server says of itself.

    Raises:
        ServerError: it can't be reached, refuses, or its answer is no status.
    """

    async def ask() -> Status:
        async with Server(url, api_key=api_key, timeout=_PATIENCE_S) as server:
            return await server.status()

    try:
        return _looked_at(asyncio.run(ask()))
    except ValidationError as error:
        raise ServerError(
            f"{url}/isochunk/status is no status that this version of isochunk reads ({_first(error)}); "
            "is it the same version as the server's?"
        ) from error


def read_status(path: Path) -> Status:
    """A saved status, or the one in what ``isochunk compare --save`` wrote, with the prompts that were compared.

    Raises:
        ConfigError: the file can't be read, or is neither.
    """
    try:
        read = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"can't read {path}: {error}") from error
    if isinstance(read, dict) and isinstance(read.get("samples"), list) and isinstance(read.get("status"), dict):
        records = [sample.get("record") for sample in read["samples"] if isinstance(sample, dict)]
        read = {**read["status"], "prompts": [record for record in records if record is not None]}
    try:
        return _looked_at(read)
    except ValidationError as error:
        raise ConfigError(
            f"{path} is neither a status of isochunk's nor a comparison ({_first(error)}): save "
            "GET /isochunk/status, or use 'isochunk compare --save'"
        ) from error


def _looked_at(read: Any) -> Status:
    return _Status.model_validate(read).model_dump()


def _first(error: ValidationError) -> str:
    """What is wrong first, and where."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]
