"""``python -m tests.versions``: tests/vllm on each version of vLLM that isochunk is made for."""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.versions.matrix import Outcome, run_tests
from tests.versions.wheels import NotThereError, python_files

VERSIONS = ("0.23.0", "0.24.0", "0.26.0", "0.28.0", "0.30.0", "0.31.0", "0.33.0")
ENDS = (VERSIONS[0], VERSIONS[-1])
BEGIN, END = "<!-- versions: begin -->\n", "<!-- versions: end -->\n"


def main() -> int:
    """Run what was asked for; the exit code is 1 when anything failed or could not be run."""
    options = _options()
    if options.ascend:
        from tests.versions.ascend import run_ascend

        return run_ascend(options.ascend, options.versions or ["v0.23.0", "main"])
    if options.server:
        from tests.versions.server import run_servers

        return run_servers(options.versions or ["0.27.1", "0.30.0"])
    versions = ENDS if options.ends else tuple(options.versions or VERSIONS)
    outcomes: list[Outcome] = []
    missing: list[str] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for of in pool.map(partial(_one, few=options.ends), versions):
            if isinstance(of, str):
                missing.append(of)
            else:
                outcomes.append(of)
    for outcome in outcomes:
        if not outcome.ok:
            print(f"\n{outcome.version}:\n{outcome.said}", file=sys.stderr)
    print(f"\n{table(outcomes)}")
    for reason in missing:
        print(f"NOT TESTED: {reason}", file=sys.stderr)
    if options.write and not missing:
        _write(options.write, table(outcomes))
    if not all(outcome.ok for outcome in outcomes):
        return 1
    return 0 if not missing or options.go_on else 1


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as a table of Markdown."""
    rows = ["| vLLM | passed | failed | of other versions only |", "| --- | --- | --- | --- |"]
    rows += [f"| {o.version} | {o.passed} | {len(o.failed)} | {o.skipped} |" for o in outcomes]
    return "\n".join(rows) + "\n"


def _one(version: str, *, few: bool) -> Outcome | str:
    try:
        folder = python_files(version)
    except NotThereError as error:
        return str(error)
    print(f"{version}: tests/vllm", flush=True)
    # A part of the random schedules and mixes: they are run in full on the installed version.
    parts = {"ISOCHUNK_SCHEDULES": "60", "ISOCHUNK_MIXES": "20" if few else "120"}
    outcome = run_tests(version, [folder], environ={name: os.environ.get(name, part) for name, part in parts.items()})
    result = "passed" if outcome.ok else f"{len(outcome.failed)} FAILED"
    print(f"{version}: {result}, {outcome.passed} passed, {outcome.seconds:.0f} s", flush=True)
    return outcome


def _write(path: Path, text: str) -> None:
    page = path.read_text()
    before, _, rest = page.partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("versions", nargs="*", help=f"versions of vLLM; without any: {' '.join(VERSIONS)}")
    parser.add_argument("--ends", action="store_true", help="the oldest and the newest only, as 'make test' does")
    parser.add_argument(
        "--go-on", action="store_true", help="say what the registry does not give, and fail for what failed only"
    )
    parser.add_argument(
        "--server", action="store_true", help="instead: a whole server on virtual stages, of the versions 0.27 to 0.32"
    )
    parser.add_argument("--jobs", type=int, default=1, help="versions tested at the same time")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table into this page of the docs")
    parser.add_argument(
        "--ascend",
        type=Path,
        metavar="REPOSITORY",
        help="instead: vLLM-Ascend's own files from this clone, at the given tags or branches",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
