"""What this machine computes: its processor, and seconds a token of the demo's model in each dtype."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from isochunk.core.errors import ConfigError

__all__ = ["Dtype", "Machine", "look", "processor"]

Dtype = str
_SETS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "avx512f": "AVX512", "avx2": "AVX2"}
_LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
_SPEED_TIMEOUT_S = 300.0

# The linear layers of one stage of the demo's model (15 of SmolLM2's 30), as so many of its widest one, on one core.
_MEASURE = """
import json, sys, time, torch
torch.set_num_threads(1)
tokens, layers = 256, 60
def least(dtype):
    rows, weights = torch.randn(tokens, 576).to(dtype), torch.randn(1536, 576).to(dtype)
    best = float("inf")
    began = time.perf_counter()
    while time.perf_counter() - began < 0.3 or best == float("inf"):
        start = time.perf_counter()
        torch.nn.functional.linear(rows, weights)
        best = min(best, time.perf_counter() - start)
    return best * layers / tokens
json.dump({name: least(getattr(torch, name)) for name in ("bfloat16", "float32")}, sys.stdout)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A processor and how quickly it computes.

    Attributes:
        name: the processor's own.
        instructions: the widest set that matters here, with what limits it in the environment.
        cores: that this process may use.
        token_s: seconds that the linear layers of one stage of the demo's model take a token, on one core, by dtype.
    """

    name: str
    instructions: str
    cores: int
    token_s: dict[Dtype, float]

    @property
    def dtype(self) -> Dtype:
        """The quickest; where bfloat16 has no instructions it is emulated, ten times slower than float32."""
        return min(self.token_s, key=lambda dtype: self.token_s[dtype])

    def __str__(self) -> str:
        speeds = ", ".join(f"{dtype} {1e3 * s:.2g} ms" for dtype, s in sorted(self.token_s.items()))
        return f"{self.name}, {self.cores} cores, {self.instructions}; a token takes a stage {speeds}"


def processor() -> tuple[str, str, int]:
    """Name, instruction set and cores of this machine."""
    name, flags = "unknown processor", set[str]()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() == "flags":
                flags = set(value.split())
    except OSError:  # no Linux: what can't be told is not needed to measure
        pass
    instructions = next((text for flag, text in _SETS.items() if flag in flags), "no AVX2")
    limits = [f"{limit}={os.environ[limit]}" for limit in _LIMITS if os.environ.get(limit)]
    if limits:
        instructions += f" limited by {' '.join(limits)}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return name, instructions, cores


def look() -> Machine:
    """Measure this machine; takes some seconds, most of them to load torch.

    Raises:
        ConfigError: torch is not there or can't compute here.
    """
    name, instructions, cores = processor()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE],
            capture_output=True,
            text=True,
            check=True,
            timeout=_SPEED_TIMEOUT_S,
        )
        speeds = {dtype: float(seconds) for dtype, seconds in json.loads(done.stdout).items()}
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"torch does not compute here: {error.stderr.strip().splitlines()[-1:]}") from error
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise ConfigError(f"the speed of this machine could not be measured: {error}") from error
    return Machine(name=name, instructions=instructions, cores=cores, token_s=speeds)
