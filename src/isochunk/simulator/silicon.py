"""What a step would cost on accelerators that are not here, from kernel times that others measured.

All that knows the package `aiconfigurator_core` (NVIDIA, Apache-2.0; the extra ``silicon``). What it says is an
estimate: measured kernels added up, interpolated between the sizes that were measured, and in parts modelled.
"""

from __future__ import annotations

import difflib
import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from isochunk.core.cost import Bend, CostModel
from isochunk.core.curve import Curve
from isochunk.core.errors import ConfigError
from isochunk.core.profile import Profile

__all__ = ["Silicon", "estimate"]

Floats = npt.NDArray[np.float64]

_PACKAGE = "aiconfigurator-core"
_CHUNKS = sorted({1, 2, 4, 8, 16, 24, 32, 48, 64, 96, *range(128, 1025, 64), *range(1280, 4097, 256),
                  *range(5120, 16_385, 1024), *range(20_480, 32_769, 4096)})  # fmt: skip
_HISTORIES = (1024, 4096, 16_384, 32_768, 65_536, 131_072, 262_144, 524_288, 1_048_576)
_FIT_CHUNKS = (128, 512, 1024, 2048, 4096, 8192, 16_384)
_KINDS = ("mla", "dsa", "msa", "moe", "mamba", "dsv4", "gdn")  # of parts that some models have, as tables are named
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXTS = (1024, 4096, 16_384, 65_536, 131_072)


@dataclass(frozen=True, slots=True, kw_only=True)
class Silicon:
    """A deployment on an accelerator.

    Attributes:
        system: as the package names it, such as ``h200_sxm``.
        model: a Hugging Face name that the package knows, or a folder with a configuration.
        backend: whose kernels: ``vllm``, ``sglang`` or ``trtllm``.
        tensor_parallel: accelerators a stage.
        expert_parallel: experts whole on one accelerator each, where they would be cut over all of the stage.
        stages: pipeline stages; each has an equal part of the layers.
        step_s: seconds of a step that kernels don't show: scheduler, launch, hand-over.
        longest: tokens of the longest prompt; costs are fitted up to there.
    """

    system: str
    model: str
    backend: str = "vllm"
    tensor_parallel: int = 1
    expert_parallel: bool = False
    stages: int = 2
    step_s: float = 0.004
    longest: int = 131_072

    def __post_init__(self) -> None:
        for option, count in (("--tensor-parallel", self.tensor_parallel), ("--stages", self.stages)):
            if count < 1:
                raise ConfigError(f"{option} {count} must be at least 1")
        if self.longest < 2048:
            raise ConfigError(f"--longest {self.longest} must be at least 2048 tokens")
        if not 0 < self.step_s < 10:
            raise ConfigError(f"--step-seconds {self.step_s:g} must be above 0 and below 10")


@dataclass(slots=True)
class _Notes:
    """What was not measured: lines that the package logged, and the share of time of what it modelled."""

    lines: list[str] = field(default_factory=list)
    sources: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    parts: set[str] = field(default_factory=set)
    modelled: set[str] = field(default_factory=set)
    tiers: set[str] = field(default_factory=set)

    def about(self) -> list[str]:
        """Lines about tables of this model's own parts; the package loads those of every kind of model."""
        others = {kind for kind in _KINDS if not any(kind in part for part in self.parts)}
        return [line for line in self.lines if not any(f" {kind}_" in line for kind in others)]


def estimate(silicon: Silicon) -> Profile:
    """The profile of one stage, with the cost of decodes and what is known about the data.

    Raises:
        ConfigError: the package is missing, or holds nothing for this system, model or parallel sizes.
    """
    notes = _Notes()
    with _listening(notes):
        engine = _engine(silicon)
        try:
            model, error = _prefill_model(silicon, engine, notes)
            decode = _decode_model(silicon, engine)
        except Exception as error_of_package:
            raise _refusal(silicon, error_of_package) from error_of_package
    return Profile(
        model=model,
        decode=decode,
        source="estimate",
        key={"model": silicon.model, "device": silicon.system, "pipeline_parallel": silicon.stages,
             "tensor_parallel": silicon.tensor_parallel, "expert_parallel": silicon.expert_parallel},
        fit={"stages": silicon.stages, "residual_median": error, "estimate": _about(silicon, notes)},
    )  # fmt: skip


def _engine(silicon: Silicon) -> Any:
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle
        from aiconfigurator_core.sdk.perf_database import get_supported_databases
    except ImportError as error:
        raise ConfigError(f"--system needs {_PACKAGE}: pip install 'isochunk[silicon]' ({error})") from error
    known = get_supported_databases()
    if silicon.system not in known:
        near = difflib.get_close_matches(silicon.system, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"--system {silicon.system}: {hint}{_PACKAGE} knows {', '.join(sorted(known))}")
    if not known[silicon.system].get(silicon.backend):
        backends = sorted(name for name, versions in known[silicon.system].items() if versions)
        raise ConfigError(f"--backend {silicon.backend}: of {silicon.system} there is {', '.join(backends)}")
    tensor = silicon.tensor_parallel
    experts = {"moe_ep_size": tensor, "moe_tp_size": 1} if silicon.expert_parallel else {"moe_tp_size": tensor}
    try:
        return EngineHandle.compile(silicon.model, silicon.system, silicon.backend, tp_size=tensor, **experts)
    except Exception as error:
        raise _refusal(silicon, error) from error


def _refusal(silicon: Silicon, error: Exception) -> ConfigError:
    experts = " --expert-parallel" if silicon.expert_parallel else ""
    what = str(error).strip().splitlines() or [type(error).__name__]
    return ConfigError(
        f"{_PACKAGE} has no estimate for --system {silicon.system} --model {silicon.model} --backend "
        f"{silicon.backend} --tensor-parallel {silicon.tensor_parallel}{experts} ({what[0]}): try a model that it "
        "knows, another size, or --expert-parallel for a model with experts"
    )


def _prefill_model(silicon: Silicon, engine: Any, notes: _Notes) -> tuple[CostModel, float]:
    """The model of one stage, and how far it is off the surface at the median."""

    def seconds(chunk: int, history: int) -> float:
        taken = float(engine.predict_prefill_latency(1, history + chunk, history)) / 1e3
        if tier := engine.last_provenance():
            notes.tiers.add(str(tier))
        return taken / silicon.stages + silicon.step_s

    alone = np.array([seconds(chunk, 0) for chunk in _CHUNKS])
    histories = [history for history in _HISTORIES if history < silicon.longest]
    pairs = [(c, h) for h in histories for c in _FIT_CHUNKS if c + h <= silicon.longest]
    chunk, history = np.array(pairs, dtype=np.float64).T
    measured = np.array([seconds(c, h) for c, h in pairs])
    more = measured - np.interp(chunk, _CHUNKS, alone)
    c2, c3, bend = _attention(chunk, history, more, measured)
    sizes = np.array(_CHUNKS, dtype=np.float64)
    inside = c2 * sizes**2 / 2 + (c2 * bend.pairs(0 * sizes, sizes) if bend else 0.0)
    line = np.maximum.accumulate(np.maximum(alone - inside, silicon.step_s))
    model = CostModel.measured(Curve(tuple(_CHUNKS), tuple(line.tolist())), c2, c3, bend)
    for size in (512, 8192):
        _note_parts(engine, size, notes)
    return model, float(np.median(np.abs(model.seconds(chunk, history) / measured - 1)))


def _attention(chunk: Floats, history: Floats, more: Floats, scale: Floats) -> tuple[float, float, Bend | None]:
    """c2, c3 and the bend that explain what history adds to a step; relative errors count."""

    def solve(columns: list[Floats]) -> tuple[Floats, float]:
        found, error = nnls(np.stack(columns, axis=1) / scale[:, None], more / scale)
        return found, float(error)

    plain = [chunk * history, history]
    (c2, c3), best = solve(plain)
    bend = None
    for place in (8192, 16_384, 32_768, 65_536, 131_072, 262_144):
        if place >= history.max():
            break
        unit = Bend(place, 2.0)  # what lies beyond the place counts once more
        beyond = unit.pairs(history, history + chunk) - unit.pairs(0 * chunk, chunk)
        found, error = solve([*plain, beyond])
        if error < 0.9 * best and found[0] > 0 and found[2] > 0:
            (c2, c3), best, bend = found[:2], error, Bend(place, 1 + float(found[2] / found[0]))
    return float(c2), float(c3), bend


def _decode_model(silicon: Silicon, engine: Any) -> CostModel:
    """Of a step of decodes: the curve over their number, and what each token of their contexts adds."""

    def seconds(batch: int, context: int) -> float:
        return float(engine.predict_decode_latency(batch, context, 2)) / 1e3 / silicon.stages + silicon.step_s

    contexts = [context for context in _CONTEXTS if context <= max(silicon.longest, _CONTEXTS[0])]
    grid = np.array([[seconds(batch, context) for context in contexts] for batch in _BATCHES])
    tokens = np.outer(_BATCHES, contexts).astype(np.float64)
    slopes = (grid[:, -1] - grid[:, 0]) / np.maximum(tokens[:, -1] - tokens[:, 0], 1.0)
    a_token = max(float(np.median(slopes)), 0.0)
    line = np.maximum.accumulate(np.maximum(grid[:, 0] - a_token * tokens[:, 0], silicon.step_s))
    return CostModel.measured(Curve(tuple(_BATCHES), tuple(line.tolist())), 0.0, a_token)


def _note_parts(engine: Any, size: int, notes: _Notes) -> None:
    """Which operations of a prefill are measured, and what share of its time the others have."""
    parts, _ = engine.run_static_per_op(batch_size=1, isl=size, osl=1, prefix=0, mode="static_ctx")
    for name, milliseconds, _, source in parts:
        notes.sources[source] += milliseconds
        notes.parts.add(name)
        if source != "silicon":
            notes.modelled.add(name.removeprefix("context_"))


def _about(silicon: Silicon, notes: _Notes) -> dict[str, Any]:
    from aiconfigurator_core.sdk.perf_database import get_latest_database_version

    total = sum(notes.sources.values()) or 1.0
    version = get_latest_database_version(silicon.system, silicon.backend)
    return {
        "data": f"{_PACKAGE} {metadata.version(_PACKAGE)}: kernels of {silicon.system} "
        f"measured with {silicon.backend} {version}",
        "modelled": sorted(notes.modelled),
        "modelled_share": 1 - notes.sources.get("silicon", 0.0) / total,
        "fallbacks": sorted(notes.tiers) + notes.about(),
        "assumed": f"{silicon.step_s:g} s a step for scheduler, launch and hand-over; stages alike",
    }


class _Listener(logging.Handler):
    """Keeps what the package says about its data."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__(logging.WARNING)
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        """Note the line, without the place of the file that it is about."""
        text = record.getMessage().splitlines()[0].partition(" from /")[0]
        if text not in self._notes.lines:
            self._notes.lines.append(text)


@contextmanager
def _listening(notes: _Notes) -> Iterator[None]:
    logger = logging.getLogger("aiconfigurator_core")
    listener, spread = _Listener(notes), logger.propagate
    logger.addHandler(listener)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(listener)
        logger.propagate = spread
