"""Discrete-event simulation of prefill instances; drives the same planner that serves."""

from isochunk.simulator.deployment import Deployment
from isochunk.simulator.loop import simulate
from isochunk.simulator.result import Result
from isochunk.simulator.trace import read_trace
from isochunk.simulator.workload import ClosedLoop, Lengths, OpenLoop, Request, Workload, make_requests, poisson

__all__ = [
    "ClosedLoop",
    "Deployment",
    "Lengths",
    "OpenLoop",
    "Request",
    "Result",
    "Workload",
    "make_requests",
    "poisson",
    "read_trace",
    "simulate",
]
