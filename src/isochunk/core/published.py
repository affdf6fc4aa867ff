"""Cost models that others published, by name; they ship with the package."""

from __future__ import annotations

import difflib
import json
from importlib.resources import files
from pathlib import Path

from isochunk.core.cost import COEFFICIENTS, CostModel
from isochunk.core.errors import ProfileError
from isochunk.core.profile import Profile, load_profile

__all__ = ["known_profile", "published_profiles"]


def published_profiles() -> dict[str, Profile]:
    """Every published model: seconds of one pipeline stage, with the number of stages it was measured on."""
    data = json.loads((files("isochunk.core") / "published_models.json").read_text(encoding="utf-8"))
    return {
        name: Profile(
            model=CostModel(*(entry[key] for key in COEFFICIENTS)),
            fit={"published": name, "stages": entry["stages"], "from": entry["source"]},
            source="published",
        )
        for name, entry in data["models"].items()
    }


def known_profile(name: str) -> Profile:
    """The profile in the file of this name, or else the published one.

    Raises:
        ProfileError: neither is there, or the file can't be read.
    """
    if Path(name).exists():
        return load_profile(Path(name))
    published = published_profiles()
    if name in published:
        return published[name]
    near = difflib.get_close_matches(name, published, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else f"published are {', '.join(published)}"
    raise ProfileError(f"--profile {name} is no file and no published profile; {hint}")
