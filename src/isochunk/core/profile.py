"""The stored fit: a small versioned JSON file."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isochunk.core.cost import COEFFICIENTS, CostModel
from isochunk.core.errors import ModelError, ProfileError

__all__ = ["FORMAT_VERSION", "Profile", "default_folder", "is_profile", "key_name", "load_profile", "save_profile"]

FORMAT = "isochunk-profile"
FORMAT_VERSION = 1

_LARGEST_FLOOR = 1e6  # seconds
_MOST_BYTES = 4 << 20
_NEWER = ("asynchronous", "graphs", "speculation", "kv_layout")  # of the key; older files don't tell them


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A cost model and where it came from.

    Attributes:
        model: cost of a step on the slowest stage.
        stage_models: one model a stage when they were measured apart; empty otherwise.
        key: what the costs depend on (model, dtype, parallel sizes, device, ...); empty for bare
            coefficients.
        fit: how well the samples carried the model (`isochunk.core.fit.Fit.as_dict`).
        floors: least c0 and c3 that online refits may reach; empty for a part of the model's own.
        decode: cost of a step that holds decodes only, its chunks being single tokens; None when a decode costs
            what a chunk of one token does. In a step with prompts too a decode adds its ``marginal``.
        source: ``probe``, ``traffic``, ``samples`` (of `isochunk fit`), ``coefficients`` (a file of these alone),
            ``published`` or ``estimate`` (of `isochunk profile`; ``fit["estimate"]`` says from what).
    """

    model: CostModel
    stage_models: tuple[CostModel, ...] = ()
    key: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    floors: tuple[float, ...] = ()
    decode: CostModel | None = None
    source: str = "samples"

    @property
    def models(self) -> CostModel | tuple[CostModel, ...]:
        """What `isochunk.plan` takes: the stage models when there are any, else the one model."""
        return self.stage_models or self.model

    @property
    def estimate(self) -> dict[str, Any]:
        """What data of results say that stand on an estimate: ``{"estimate": ...}``; nothing of a measured profile."""
        about = self.fit.get("estimate")
        return {"estimate": about} if isinstance(about, dict) else {}


def default_folder() -> Path:
    """``$ISOCHUNK_CACHE``, or ``isochunk`` under ``$XDG_CACHE_HOME`` or ``~/.cache``.

    Raises:
        ProfileError: neither is set and there is no home folder.
    """
    if own := os.environ.get("ISOCHUNK_CACHE"):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isochunk"
    except RuntimeError as error:
        raise ProfileError(f"no folder for profiles and models: {error}; set ISOCHUNK_CACHE") from None


def key_name(key: dict[str, Any]) -> str:
    """File name of the profile with this key."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return f"{digest[:20]}.json"


def save_profile(path: Path, profile: Profile) -> None:
    """Write atomically: a reader sees the old file or the new one, never a part.

    Raises:
        ProfileError: the file can't be written.
    """
    data = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "model": profile.model.as_dict(),
        "stages": [m.as_dict() for m in profile.stage_models],
        "floors": list(profile.floors),
        **({"decode": profile.decode.as_dict()} if profile.decode else {}),
        "source": profile.source,
        "key": profile.key,
        "fit": profile.fit,
    }
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # As any new file, so that another user's server may read it where this user's umask lets it.
        with temporary.open("x", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
            file.write("\n")
        os.replace(temporary, path)
    except (OSError, ValueError) as error:
        with suppress(OSError, ValueError):
            temporary.unlink(missing_ok=True)
        raise ProfileError(f"can't write the profile {path}: {error}; choose a folder you may write to") from error


def is_profile(path: Path) -> bool:
    """Whether this file says that it is a profile, of whatever version and for whatever deployment."""
    try:
        data = _read(path)
    except ProfileError:
        return False
    return isinstance(data, dict) and (data.get("format") == FORMAT or _is_bare(data))


def _read(path: Path) -> Any:
    """What the file holds.

    Raises:
        ProfileError: it can't be read, is no file, is too large, or is not JSON.
    """
    try:
        # A pipe or a device may block or never end.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ProfileError(f"can't read the profile {path}: it is no regular file")
            text = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ProfileError(f"can't read the profile {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(text) > _MOST_BYTES:
        raise ProfileError(f"{path} is larger than {_MOST_BYTES} bytes: no profile")
    try:
        return json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProfileError(
            f"{path} is not JSON ({error}): corrupt or truncated; delete it and calibrate again"
        ) from error


def _is_bare(data: dict[str, Any]) -> bool:
    return "format" not in data and set(COEFFICIENTS[:3]) <= set(data)


def load_profile(path: Path, *, key: dict[str, Any] | None = None) -> Profile:
    """Read a profile file, or bare coefficients ``{"c0": .., "c1": .., "c2": .., "c3": ..}``.

    Args:
        key: refuse a file that says it was measured on another deployment.

    Raises:
        ProfileError: the file is missing, corrupt, foreign, newer, or holds another deployment's costs.
    """
    data = _read(path)
    if not isinstance(data, dict):
        raise ProfileError(f"{path} holds a {type(data).__name__}, not a profile object")
    if _is_bare(data):
        return Profile(model=_model(path, data), source="coefficients")
    if data.get("format") != FORMAT:
        raise ProfileError(f"{path} is not an isochunk profile (format = {str(data.get('format'))[:60]!r})")
    version = data.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ProfileError(f"{path}: version = {str(version)[:60]!r} must be a whole number from 1 to {FORMAT_VERSION}")
    if version > FORMAT_VERSION:
        raise ProfileError(
            f"{path}: version {version} is newer than the {FORMAT_VERSION} this isochunk reads; upgrade isochunk"
        )
    stages = data.get("stages", [])
    parts = {name: data.get(name, {}) for name in ("key", "fit")}
    if not isinstance(stages, list) or not all(isinstance(part, dict) for part in parts.values()):
        raise ProfileError(f"{path}: 'stages' must be a list, 'key' and 'fit' objects; calibrate again")
    profile = Profile(
        model=_model(path, data.get("model")),
        stage_models=tuple(_model(path, stage) for stage in stages),
        floors=_floors(path, data.get("floors", [])),
        decode=_model(path, data["decode"]) if data.get("decode") is not None else None,
        source=str(data.get("source", "samples")),
        **parts,
    )
    if key is not None and profile.key:
        asked = {*profile.key, *key} - {name for name in _NEWER if name not in profile.key}
        different = sorted(name for name in asked if profile.key.get(name) != key.get(name))
    else:
        different = []
    if different:
        raise ProfileError(f"{path} was measured on another deployment: {', '.join(different)} differ")
    return profile


def _floors(path: Path, data: Any) -> tuple[float, ...]:
    numbers = isinstance(data, list) and all(
        isinstance(value, (int, float)) and 0 <= value <= _LARGEST_FLOOR for value in data
    )
    if not numbers or len(data) not in (0, 2):
        raise ProfileError(
            f"{path}: 'floors' = {str(data)[:60]} must be two finite numbers of seconds, at least 0; calibrate again"
        )
    return tuple(map(float, data))


def _model(path: Path, data: Any) -> CostModel:
    if not isinstance(data, dict):
        raise ProfileError(f"{path}: no coefficients found; expected an object with c0, c1, c2, c3")
    try:
        return CostModel.of(data)
    except ModelError as error:
        raise ProfileError(f"{path}: {error}") from error
