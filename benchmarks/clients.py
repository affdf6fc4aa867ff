"""Other people's load clients against a real vLLM with isochunk: do they calibrate it, and do their prompts count?

    python -m benchmarks.clients                          # all, each installed into a virtual environment of its own
    python -m benchmarks.clients --only vllm,guidellm

Each sends 5 prompts of 8000 tokens, one at a time, to the tiny random Qwen3 on two stages. What they did is read from
the server (``/isochunk/status``), not from their own reports: how many prompts came, how long they were, how much of
them was in the prefix cache, and how far the prediction was off. ``docs/calibration.md`` explains the commands.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.models import ENVIRON, isochunk_options, options, tiny_qwen3
from isochunk.bench.text import Prose
from isochunk.deployment.server import running_server

REQUESTS, TOKENS = 5, 8000
NAME = "tiny-qwen3"
VLLM_BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@dataclass(frozen=True)
class Target:
    """The server, and where a client may put its files."""

    url: str
    tokenizer: Path
    folder: Path


@dataclass(frozen=True)
class Client:
    """What to install, and the command that sends the prompts."""

    packages: tuple[str, ...]
    command: Callable[[Path, Target], list[str]]
    exact: bool = True
    alike: bool = False  # all its prompts are the same one, which must show


def vllm_bench(_: Path, target: Target) -> list[str]:
    return [
        *(sys.executable, "-c", VLLM_BENCH, "--backend", "openai", "--endpoint", "/v1/completions"),
        *("--base-url", target.url, "--model", NAME, "--tokenizer", str(target.tokenizer)),
        *("--dataset-name", "random", "--random-input-len", str(TOKENS), "--random-output-len", "1"),
        *("--num-prompts", str(REQUESTS), "--max-concurrency", "1", "--ignore-eos", "--seed", seed()),
    ]


def guidellm(bin_folder: Path, target: Target) -> list[str]:
    return [
        *(str(bin_folder / "guidellm"), "run"),
        *("--backend", f"kind=openai_http,target={target.url},model={NAME},request_format=/v1/completions"),
        *("--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={TOKENS},output_tokens=1"),
        *("--tokenizer", f"kind=huggingface_auto,model={target.tokenizer}"),
        *("--seed", f"kind=static,value={seed()}"),
        *("--output", f"kind=json,path={target.folder / 'guidellm.json'}"),
    ]


def aiperf(bin_folder: Path, target: Target) -> list[str]:
    return [
        *(str(bin_folder / "aiperf"), "profile", "--model", NAME, "--tokenizer", str(target.tokenizer)),
        *("--url", target.url, "--endpoint-type", "completions", "--streaming", "--prompt-corpus", "sonnet"),
        *("--isl", str(TOKENS), "--isl-stddev", "0", "--osl", "1", "--concurrency", "1"),
        *("--request-count", str(REQUESTS), "--num-dataset-entries", str(REQUESTS), "--random-seed", seed()),
        *("--extra-inputs", "ignore_eos:true", "--output-artifact-dir", str(target.folder / "aiperf")),
    ]


AISBENCH_MODEL = """
from ais_bench.benchmark.models import VLLMCustomAPIChatStream

models = [
    dict(
        attr="service",
        type=VLLMCustomAPIChatStream,
        abbr="vllm-api-stream-chat",
        path="{tokenizer}",
        model="{model}",
        request_rate=0,
        retry=1,
        host_ip="{host}",
        host_port={port},
        max_out_len=1,
        batch_size=1,
        generation_kwargs=dict(temperature=0, ignore_eos=True),
    )
]
"""


SYNTHETIC = """
synthetic_config = {{
    "Type": "string",
    "RequestCount": {requests},
    "StringConfig": {{
        "Input": {{"Method": "uniform", "Params": {{"MinValue": {tokens}, "MaxValue": {tokens}}}}},
        "Output": {{"Method": "uniform", "Params": {{"MinValue": 1, "MaxValue": 1}}}},
    }},
}}
"""


def aisbench_published(bin_folder: Path, target: Target) -> list[str]:
    """The published procedure."""
    text = SYNTHETIC.format(requests=REQUESTS, tokens=TOKENS)
    (installed_aisbench(bin_folder) / "datasets/synthetic/synthetic_config.py").write_text(text, encoding="utf-8")
    return [*aisbench_command(bin_folder, target), "--datasets", "synthetic_gen"]


def aisbench(bin_folder: Path, target: Target) -> list[str]:
    """Prompts of our own, each with another beginning: its synthetic ones are all the same."""
    prompts = target.folder / "prompts.jsonl"
    with prompts.open("w", encoding="utf-8") as file:
        prose = Prose(secrets.randbits(32))
        for _ in range(REQUESTS):
            text = ""
            for paragraph in prose.paragraphs():
                text += paragraph
                if len(text) > 4.5 * TOKENS:
                    break
            file.write(json.dumps({"question": text, "answer": ""}) + "\n")
    chosen = ["--custom-dataset-path", str(prompts), "--custom-dataset-data-type", "qa"]
    return [*aisbench_command(bin_folder, target), *chosen]


def installed_aisbench(bin_folder: Path) -> Path:
    return next(bin_folder.parent.glob("lib/python*/site-packages/ais_bench"))


def aisbench_command(bin_folder: Path, target: Target) -> list[str]:
    address = urlsplit(target.url)
    config = AISBENCH_MODEL.format(tokenizer=target.tokenizer, model=NAME, host=address.hostname, port=address.port)
    models = installed_aisbench(bin_folder) / "benchmark/configs/models/vllm_api"
    (models / "vllm_api_stream_chat.py").write_text(config, encoding="utf-8")
    return [
        *(str(bin_folder / "ais_bench"), "--models", "vllm_api_stream_chat", "--mode", "perf", "--debug"),
        *("--work-dir", str(target.folder / "aisbench")),
    ]


AISBENCH = ("ais-bench-benchmark==3.1.20260630", "pyarrow<22", "setuptools<81", "torch==2.13.0")
CLIENTS = {
    "vllm": Client((), vllm_bench),  # comes with vLLM
    "guidellm": Client(("guidellm==0.8.1", "torch==2.13.0"), guidellm),
    "aiperf": Client(("aiperf==0.13.0",), aiperf),
    "aisbench": Client(AISBENCH, aisbench, exact=False),
    "aisbench-published": Client(AISBENCH, aisbench_published, exact=False, alike=True),
}


def seed() -> str:
    return str(secrets.randbits(30))


def installed(name: str, client: Client, venvs: Path) -> Path:
    """The folder of its programs; installs them the first time."""
    folder = venvs / name.split("-", maxsplit=1)[0]
    ready = folder / ".ready"
    if client.packages and not ready.exists():
        print(f"{name}: installing {' '.join(client.packages)}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *client.packages]
        subprocess.run(pip, check=True)
        ready.touch()
    return folder / "bin"


def send(name: str, client: Client, programs: Path, target: Target) -> tuple[list[dict[str, Any]], bool]:
    """Run the client; the server's records of the prompts that it sent, and whether the client ended well."""
    target.folder.mkdir(parents=True, exist_ok=True)
    before = len(prompts_of(target.url))
    assert before < 32 - REQUESTS, "the server keeps the last 32 prompts only"
    with (target.folder / "client.log").open("wb") as log:
        environ = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
        command = client.command(programs, target)
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environ, check=False).returncode
    if code:
        print(f"{name}: exit code {code}, see {target.folder / 'client.log'}", flush=True)
    return prompts_of(target.url)[before:], code == 0


def prompts_of(url: str) -> list[dict[str, Any]]:
    return list(httpx.get(f"{url}/isochunk/status", timeout=120).json()["prompts"])


def report(name: str, client: Client, prompts: list[dict[str, Any]], ended_well: bool) -> bool:
    """One line; whether all went as `docs/calibration.md` says."""
    long = [prompt for prompt in prompts if prompt["tokens"] > TOKENS // 2]
    hits = sum(prompt["cached"] > prompt["tokens"] // 2 for prompt in long)
    off = [prompt["predicted_ttft_s"] / prompt["measured_ttft_s"] - 1 for prompt in long if prompt["predicted_ttft_s"]]
    exact = sum(prompt["tokens"] == TOKENS for prompt in long)
    alike = hits >= REQUESTS - 1
    fresh = len(long) - hits
    well = (
        ended_well and alike == client.alike and (alike or fresh >= REQUESTS) and (exact >= fresh or not client.exact)
    )
    middle = f"prediction off by {median(off):+.1%} in the middle" if off else "none predicted"
    print(
        f"{name}: {len(long)} long prompts, {exact} of exactly {TOKENS} tokens, {hits} prefix hits, {middle}"
        f"{'; all prompts alike: nothing is calibrated' if alike else ''}{'' if well else ' - NOT AS EXPECTED'}",
        flush=True,
    )
    return well


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CLIENTS), help="names with commas between")
    parser.add_argument("--output", type=Path, default=Path("results/clients"))
    given = parser.parse_args()
    chosen = given.only.split(",")
    programs = {name: installed(name, CLIENTS[name], given.output / "venvs") for name in chosen}
    model = tiny_qwen3()
    well = True
    for name in chosen:  # a fresh server and profile for each, so that none learns from the one before
        log = given.output / name / "server.log"
        chosen_options = [*options(NAME, TOKENS + 1000), *isochunk_options(profile="off")]
        with running_server(model, chosen_options, log=log, environ=ENVIRON) as url:
            target = Target(url, model, (given.output / name).absolute())
            well &= report(name, CLIENTS[name], *send(name, CLIENTS[name], programs[name], target))
    sys.exit(not well)


if __name__ == "__main__":
    main()
