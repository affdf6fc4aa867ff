"""Says to people of every result that stands on an estimate that it does."""

from __future__ import annotations

import sys

from isochunk.core.profile import Profile

__all__ = ["say_estimate"]


def say_estimate(profile: Profile) -> None:
    """Tell people on stderr that these costs are an estimate, from which data, and which parts are not measured."""
    about = profile.estimate.get("estimate")
    if about is None:
        return
    share = about.get("modelled_share", 0.0)
    print(f"estimate, not a measurement: {about.get('data')}; {about.get('assumed')}", file=sys.stderr)
    if modelled := about.get("modelled"):
        print(f"  modelled, not measured ({share:.0%} of a prefill): {', '.join(modelled)}", file=sys.stderr)
    for line in about.get("fallbacks", []):
        print(f"  fell back: {line}", file=sys.stderr)
