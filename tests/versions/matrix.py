"""tests/vllm on one version of vLLM, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Outcome", "run_tests"]

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the tests on one version.

    Attributes:
        version: vLLM's.
        passed: tests that passed.
        failed: names of those that did not.
        skipped: tests of other versions' forms.
        seconds: that they took.
        said: the end of what pytest printed, for a person to read when something failed.
    """

    version: str
    passed: int
    failed: tuple[str, ...]
    skipped: int
    seconds: float
    said: str = ""

    @property
    def ok(self) -> bool:
        """Whether tests ran and all passed."""
        return self.passed > 0 and not self.failed


def run_tests(
    version: str,
    folders: Sequence[Path],
    tests: Sequence[str] = ("tests/vllm",),
    environ: Mapping[str, str] | None = None,
) -> Outcome:
    """Run the tests over the Python files in these folders, in a process with these variables beside its own."""
    path = os.pathsep.join(map(str, [*folders, ROOT / "src", ROOT]))
    environ = {**os.environ, **(environ or {}), "PYTHONPATH": path}
    environ.pop("VLLM_PLUGINS", None)
    # Virtual stages stand in for workers, which need the whole wheel.
    # Warnings of torch about an older vLLM's code are nobody's to mend, so they are no errors here.
    options = ["-p", "tests.versions.told", "-o", "filterwarnings=default", "-o", f"cache_dir=.cache/pytest-{version}"]
    options += ["-m", "not engine", "--ignore=tests/vllm/virtual", "-rfE", "--tb=short", "--color=no"]
    began = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return read_outcome(version, result.stdout, time.monotonic() - began)


def read_outcome(version: str, said: str, seconds: float) -> Outcome:
    """What pytest's own report says; nothing passed when it ran on another vLLM than asked."""
    failed = [line.split(" - ")[0] for line in said.splitlines() if re.match(r"(FAILED|ERROR) \S+", line)]
    ran = re.search(r"^vLLM (\S+) at ", said, re.MULTILINE)
    if ran is None or ran[1].split("+")[0] != version:
        failed.append(f"ran on vLLM {ran[1] if ran else 'nothing'}, not on {version}")
    counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|skipped)", said.splitlines()[-1])}
    return Outcome(
        version=version,
        passed=counts.get("passed", 0),
        failed=tuple(failed),
        skipped=counts.get("skipped", 0),
        seconds=seconds,
        said="\n".join(said.splitlines()[-60:]),
    )
