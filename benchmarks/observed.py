"""What being looked at costs a server, and how long its page takes to open; both on rehearsed stages.

    python -m benchmarks.observed                  # /metrics and the status each second, on and off in turn: TTFT
    python -m benchmarks.observed --page           # GET /isochunk in headless Chromium, 10,000 steps, 16 stages
    python -m benchmarks.observed --bookkeeping    # sums, histograms and log lines of a step, in this process

The first sends the same number of prompts with and without somebody who scrapes, in pairs of random order, and prints
the ratio of the means with its 95% interval (pairs drawn anew). Give it quiet cores, and as many runs as it needs.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import random
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import fmean, median
from typing import Any

import httpx
import numpy as np

from isochunk.cli.rehearsed import MODEL_NAME, running_rehearsal
from isochunk.vllm.narrator import Narrator
from isochunk.vllm.prompts import PromptRecord
from isochunk.vllm.tally import Tally
from isochunk.vllm.virtual.rehearsal import Rehearsal

PROFILE = "kimi-k2.5-mxfp4@mi355x/pp4tp1"
LIMIT = 8192
SCRAPED = ("/metrics", "/isochunk/status")
EVERY_S = 1.0
BLOCK = 3  # prompts with, then as many without
STEPS = 10_000
PROMPTS = 32  # that a status holds


def prompt(tokens: int) -> list[int]:
    return random.choices(range(100, 40_000), k=tokens)


def scrape(url: str, on: Event, out: Any) -> None:
    """Ask each second while ``on``, as Prometheus would; seconds that each answer took go to ``out``."""
    while True:
        on.wait()
        begun = time.monotonic()
        for path in SCRAPED:
            start = time.monotonic()
            with urllib.request.urlopen(url + path) as answer:
                answer.read()
            out.put((path, time.monotonic() - start))
        time.sleep(max(EVERY_S - (time.monotonic() - begun), 0))


def ttft(client: httpx.Client, tokens: int) -> float:
    body = {"model": MODEL_NAME, "prompt": prompt(tokens), "max_tokens": 1}
    start = time.perf_counter()
    client.post("/v1/completions", json=body).raise_for_status()
    return time.perf_counter() - start


@contextmanager
def rehearsed(folder: Path, tokens: int, stages: int, speed: float) -> Iterator[str]:
    """The address of a server for prompts of so many tokens."""
    options = ["--max-num-batched-tokens", str(LIMIT), "--max-model-len", str(tokens + 64)]
    rehearsal, environ = Rehearsal(profile=PROFILE, speed=speed), {"ISOCHUNK_CACHE": str(folder)}
    with running_rehearsal(rehearsal, options, stages=stages, log=folder / "log", environ=environ) as url:
        yield url


def compare(seconds: float, tokens: int, stages: int, speed: float) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        rehearsed(Path(folder), tokens, stages, speed) as url,
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        on, out = multiprocessing.Event(), multiprocessing.Queue()
        scraper = multiprocessing.Process(target=scrape, args=(url, on, out), daemon=True)
        scraper.start()
        for _ in range(8):
            ttft(client, tokens)
        pairs: list[tuple[float, float]] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            came = {}
            for watched in random.sample([True, False], 2):
                (on.set if watched else on.clear)()
                came[watched] = fmean(ttft(client, tokens) for _ in range(BLOCK))
            pairs.append((came[True], came[False]))
        scraper.terminate()
        scraper.join()
    told = np.array(pairs)
    drawn = np.random.default_rng(0).integers(0, len(told), (10_000, len(told)))
    ratios = told[drawn, 0].mean(axis=1) / told[drawn, 1].mean(axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    watched, alone = told.mean(axis=0)
    print(
        f"{len(pairs)} pairs of {BLOCK} prompts of {tokens} tokens, {stages} stages: TTFT {1e3 * watched:.2f} ms "
        f"scraped, {1e3 * alone:.2f} ms not: {watched / alone:.4f} ({low:.4f}-{high:.4f})"
    )
    answers: dict[str, list[float]] = {path: [] for path in SCRAPED}
    while not out.empty():
        path, took = out.get()
        answers[path].append(took)
    for path, took in answers.items():
        print(f"{path}: {len(took)} answers, median {1e3 * median(took):.1f} ms, longest {1e3 * max(took):.1f} ms")


_WHEN = """
new MutationObserver(() => {
  if (!document.body?.dataset.ready || window.drawn) return;
  window.drawn = performance.now();
  requestAnimationFrame(() => requestAnimationFrame(() => { window.seen = performance.now(); }));
}).observe(document, { attributes: true, subtree: true, childList: true });
"""


def page(opens: int, stages: int) -> None:
    from tests.vllm.live.browser import browsing

    chunk = 320
    tokens = chunk * -(-STEPS // PROMPTS)
    with (
        tempfile.TemporaryDirectory() as folder,
        rehearsed(Path(folder), tokens, stages, speed=1000) as url,
        httpx.Client(base_url=url, timeout=300) as client,
        browsing(Path(folder) / "browser") as browser,
    ):
        client.post("/isochunk/policy", json={"policy": "fixed", "chunk": chunk}).raise_for_status()
        for _ in range(PROMPTS):
            ttft(client, tokens)
        told = client.get("/isochunk/status").json()
        steps = sum(len(each["chunks"]) for each in told["prompts"])
        browser.call("Page.addScriptToEvaluateOnNewDocument", source=_WHEN)
        for width in (1200, 390):
            took = []
            for _ in range(opens):
                browser.show(f"{url}/isochunk", width=width, ready="window.seen")
                took.append(browser.run("window.seen"))
            print(
                f"{steps} steps, {told['stages']} stages, {width} px: open in {median(took):.0f} ms "
                f"({min(took):.0f}-{max(took):.0f}, {opens} times, the first {took[0]:.0f})"
            )


def bookkeeping(steps: int = 20, prompts: int = 2000) -> None:
    """Microseconds that a step's and a prompt's sums and log line take."""
    tally, narrator = Tally(), Narrator(logging.getLogger("benchmark"))
    record = PromptRecord(request_id="a", policy="optimal", chunk=None, cached=0, predicted_ttft_s=1.0, tokens=8192)
    start = time.perf_counter()
    for number in range(prompts):
        for _ in range(steps):
            tally.step(1.0, 2.0, 0.05, 0.05, [512])
        tally.prompt(8192, 1.0, 1.0, 1.2)
        narrator.tell(number, [record], tally)
    each = (time.perf_counter() - start) / prompts
    print(f"{1e6 * each:.0f} us a prompt of {steps} steps, {1e6 * each / steps:.1f} us a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--stages", type=int, help="by default 4, with --page 16")
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--opens", type=int, default=15)
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--bookkeeping", action="store_true")
    args = parser.parse_args()
    if args.page:
        page(args.opens, args.stages or 16)
    elif args.bookkeeping:
        bookkeeping()
    else:
        compare(args.seconds, args.tokens, args.stages or 4, args.speed)


if __name__ == "__main__":
    main()
