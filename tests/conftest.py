"""Hypothesis' examples may take as long as a busy machine needs; loaded before any test module is."""

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
