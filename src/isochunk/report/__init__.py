"""Plots, HTML page, trace files."""
