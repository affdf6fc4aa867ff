"""Benchmarks that print the figures of the README; run them as modules from the repository."""
