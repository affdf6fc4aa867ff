"""isochunk: equal-time prefill chunks for pipeline-parallel vLLM."""

from isochunk.core.cost import CostModel
from isochunk.core.errors import IsochunkError
from isochunk.core.fit import Fit, fit
from isochunk.core.flowshop import makespan
from isochunk.core.planner import Plan, plan

__all__ = ["CostModel", "Fit", "IsochunkError", "Plan", "fit", "makespan", "plan"]

__version__ = "0.1.0"
