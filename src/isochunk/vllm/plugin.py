"""vLLM's ``general_plugins`` entry point: runs in every process of vLLM, many times over."""

from __future__ import annotations

import os
from typing import Any

from isochunk.vllm import compat
from isochunk.vllm.settings import claim_section, select_scheduler
from isochunk.vllm.virtual.rehearsal import rehearsal_of
from isochunk.vllm.virtual.stand_in import check, stand_in

__all__ = ["register"]


def register() -> None:
    """Let the one flag choose isochunk's scheduler, and a rehearsal its virtual stages.

    Does nothing to servers that don't enable it and are not rehearsed.
    """
    if rehearsal_of(os.environ) is not None:
        stand_in()
    compat.around_engine_config(claim_section, _configured)


def _configured(vllm_config: Any, named: Any) -> None:
    if (rehearsal := rehearsal_of(os.environ)) is not None:
        check(vllm_config, rehearsal)
    select_scheduler(vllm_config, named)
