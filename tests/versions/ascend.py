"""isochunk against vLLM-Ascend's own configuration and schedulers, on a machine without an NPU.

The files come from a clone that the user has; they are written to the cache and nowhere else.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from isochunk.core.profile import default_folder
from tests.versions.matrix import run_tests
from tests.versions.wheels import NotThereError, python_files

__all__ = ["run_ascend"]

_CASES = "tests/versions/ascend_cases.py"
_VLLM = {"v0.23.0": "0.23.0", "releases/v0.23.0": "0.23.0", "v0.25.1rc1": "0.25.1", "main": "0.27.1"}


def run_ascend(repository: Path, refs: Sequence[str]) -> int:
    """Run the cases on each tag or branch of this clone of `vllm-project/vllm-ascend`; the exit code."""
    failed = False
    for ref in refs:
        if ref not in _VLLM:
            print(f"{ref}: for which vLLM? Known: {', '.join(_VLLM)}", file=sys.stderr)
            return 2
        try:
            vllm = python_files(_VLLM[ref])
            ascend = _files(repository, ref)
        except NotThereError as error:
            print(f"NOT TESTED: {error}", file=sys.stderr)
            return 1
        outcome = run_tests(_VLLM[ref], [vllm, ascend], [_CASES], {"ISOCHUNK_ASCEND": ref})
        print(f"vLLM-Ascend {ref} on vLLM {_VLLM[ref]}: {outcome.passed} passed, {len(outcome.failed)} failed")
        if not outcome.ok:
            print(outcome.said, file=sys.stderr)
            failed = True
    return int(failed)


def _files(repository: Path, ref: str) -> Path:
    """Its Python files at this tag or branch, as folder for ``PYTHONPATH``."""
    folder = default_folder() / "vllm-ascend" / ref.replace("/", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    archive = subprocess.run(
        ["git", "-C", str(repository), "archive", ref, "vllm_ascend"], capture_output=True, check=False
    )
    if archive.returncode:
        raise NotThereError(f"{repository} has no {ref}: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", str(folder), "--wildcards", "*.py"], input=archive.stdout, check=True)
    version = ref.rpartition("v")[2] if ref != "main" else _VLLM[ref]
    metadata = folder / f"vllm_ascend-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm-ascend\nVersion: {version}\n")
    return folder
