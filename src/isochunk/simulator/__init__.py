"""Discrete-event simulation of prefill instances; drives the same planner that serves."""
