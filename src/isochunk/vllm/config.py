"""The section ``profiling_chunk_config`` of `additional_config`: read and validated here."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

from isochunk.core.errors import ConfigError
from isochunk.core.planner import Policy
from isochunk.vllm.sections import KEY, find_section

__all__ = ["KEY", "ChunkConfig", "read_config"]

Planner = Literal["isochunk", "ascend"]


def _no_folder(path: str) -> str:
    if not path or os.path.isdir(path):
        raise ValueError("must be the path of a file, or auto, or off")
    return path


class ChunkConfig(BaseModel):
    """How isochunk runs inside vLLM. Frozen; unknown keys are errors.

    ``planner`` "ascend" leaves the section to vLLM-Ascend, whose keys have the same names.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    enabled: StrictBool = False
    planner: Planner = "isochunk"
    smooth_factor: Annotated[float, Field(ge=0, le=1, strict=True)] = 1.0
    min_chunk: Annotated[StrictInt, Field(gt=0)] | None = None
    need_timing: StrictBool = True
    max_fit_chunk: Annotated[StrictInt, Field(gt=5)] = 30
    policy: Policy = "optimal"
    profile: Annotated[StrictStr, AfterValidator(_no_folder)] = "auto"
    max_probe_seconds: Annotated[float, Field(ge=0, strict=True)] = 120.0
    max_queue_delay: Annotated[float, Field(ge=0, strict=True)] | None = None
    least_work_first: Annotated[float, Field(ge=0, strict=True)] | None = None
    max_inter_token_latency: Annotated[float, Field(gt=0, strict=True)] | None = None


def read_config(additional_config: Any) -> ChunkConfig:
    """The validated section; the defaults (off) when there is none.

    Raises:
        ConfigError: names the key, the value and what is allowed.
    """
    where, section = find_section(additional_config)
    if section is None:
        return ChunkConfig()
    if not isinstance(section, Mapping):
        raise ConfigError(f"{where} = {section!r} must be an object, such as {{'enabled': true}}")
    known = list(ChunkConfig.model_fields)
    for name in section:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"{where}: unknown key {name!r}; did you mean {near!r}? Known: {', '.join(known)}")
    try:
        return ChunkConfig.model_validate(dict(section))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{where}.{first['loc'][0]} = {first['input']!r}: {first['msg']}") from None
