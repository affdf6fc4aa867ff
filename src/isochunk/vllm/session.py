"""One engine's isochunk: stored profile, start-up probe, and the controller that plans its steps."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np

import isochunk
from isochunk.core.errors import IsochunkError, ProfileError
from isochunk.core.fit import Fit
from isochunk.core.planner import Policy
from isochunk.core.profile import Profile, default_folder, is_profile, key_name, load_profile, save_profile
from isochunk.core.steps import Prefill
from isochunk.vllm import compat
from isochunk.vllm.config import ChunkConfig
from isochunk.vllm.controller import Controller
from isochunk.vllm.health import Attempt, Health
from isochunk.vllm.narrator import Narrator
from isochunk.vllm.probe import PREFIX, Probe, Steps, probe_chunks
from isochunk.vllm.settings import profile_key
from isochunk.vllm.versions import supported

__all__ = ["Session"]

logger = logging.getLogger("vllm.isochunk")

_DRAINED = 64  # turns of the engine in which the steps of a probe that failed come out; pipelines are shallower


class Session:
    """What the scheduler mixin holds: it owns the controller, the probe and the profile file.

    Args:
        scheduler: vLLM's scheduler.
        config: the plugin's configuration.
        controller: plans and times the steps.
    """

    def __init__(self, scheduler: Any, config: ChunkConfig, controller: Controller) -> None:
        self.controller = controller
        self._scheduler = scheduler
        self._config = config
        self._key = profile_key(scheduler.vllm_config)
        self._path = _profile_path(config.profile, self._key)
        self._probe: Probe | None = None
        self._probing: Probe | None = None
        self.health = Health()
        self._narrator = Narrator(logger)
        self._idles = False
        self._load()

    def start(self, engine: Any) -> None:
        """Probe, unless a stored profile fits. Runs in the engine's process before its first request.

        Raises:
            TimeoutError: vLLM's own: a step did not come out of the workers. Where one stage failed, the others wait
                for it for ever, so such a server would answer nobody.
        """
        if self.controller.model is not None or self._config.max_probe_seconds == 0:
            return
        stuck: TimeoutError | None = None
        try:
            with self.attempt("the probe"), compat.without_prefix_cache(self._scheduler):
                try:
                    self._run_probe(engine)
                except TimeoutError as error:
                    stuck = error
                    raise
                finally:
                    if stuck is None:
                        self._drain(engine)
        finally:
            self._give_up()
            self._probing = None
        if stuck is not None:
            logger.error(
                "isochunk: the workers did not end a step of the probe within vLLM's own limit (%s); the reason "
                "is in their log above. `max_probe_seconds: 0` starts without a probe",
                stuck,
            )
            raise stuck

    def tokens(
        self,
        queue: Sequence[Prefill],
        more: int,
        beside: Sequence[tuple[int, int]],
        *,
        between: bool = False,
        max_seconds: float = math.inf,
    ) -> int | None:
        """Prefill tokens of the next step; None leaves the step to vLLM."""
        if self._probing is not None and queue[0].key.startswith(PREFIX):
            record = self.controller.log.find(queue[0].key)
            so_far = record.steps if record is not None else []
            return self._probing.chunk_at(queue[0].key, queue[0].history, so_far)
        return self.controller.tokens(queue, more, beside, between=between, max_seconds=max_seconds)

    def idle(self, now: float) -> bool:
        """A step is on its way and the engine is about to wait: the time for a refit; whether one was due.

        Where an engine calls this, refits wait for it as long as there are others to serve.
        """
        due = self.controller.due
        self._idles = True
        self._refitted(self.controller.refit_due(now))
        return due

    def exited(self, now: float, output: Any) -> None:
        """A step came out of the pipeline."""
        controller = self.controller
        alarms, resting = controller.counters.alarms, controller.resting
        later = self._idles and len(self._scheduler.requests) > 1
        self._idles = False
        refit = controller.exited(now, output, learn=self._probing is None, later=later)
        if controller.ended and self._probing is None:
            self._narrator.tell(now, controller.ended, controller.tally)
        if controller.counters.alarms > alarms:
            logger.warning(
                "isochunk: steps take far longer than predicted; the step cost is raised: %s", controller.model
            )
        if controller.resting > resting:
            logger.warning(
                "isochunk: prompts came later than vLLM's own chunks would have brought them; "
                "the next %d are left to vLLM",
                controller.resting,
            )
        self._refitted(refit)

    def _refitted(self, refit: Fit | None) -> None:
        if refit is not None:
            logger.info(
                "isochunk: steps took %.2f times what was predicted; refitted to %s, %.1f%% off",
                self.controller.drift,
                refit.model,
                100 * refit.error,
            )
            self._store(refit, "traffic")

    def use_policy(self, policy: str, chunk: int | None) -> dict[str, Any]:
        """Switch the policy; returns what is in force, or ``{"error": ...}``."""
        try:
            self.controller.use_policy(cast(Policy, policy), chunk)  # the planner checks it
        except IsochunkError as error:
            return {"error": str(error)}
        return {"policy": self.controller.planner.policy, "chunk": self.controller.chunk}

    @contextmanager
    def attempt(self, what: str) -> Iterator[Attempt]:
        """Do something of ours that must not stop serving; an error in it is said, counted, and ends here."""
        before = self.health.failed
        with self.health.attempt(what) as attempt:
            yield attempt
        self.controller.counters.fallbacks += self.health.failed - before

    def as_dict(self, *, prompts: bool = True) -> dict[str, Any]:
        """Plain data for the status endpoint; without prompts and probe where only sums are asked for."""
        return {
            "version": isochunk.__version__,
            "vllm": {"version": compat.vllm_version(), "supported": supported()},
            "health": self.health.as_dict(),
            **self.controller.as_dict(prompts=prompts),
            "block_size": self._scheduler.block_size,
            "profile": str(self._path) if self._path else None,
            **({"probe": self._probe_dict()} if prompts else {}),
        }

    def _probe_dict(self) -> dict[str, Any] | None:
        if self._probe is None:
            return None
        data = self._probe.as_dict()
        if (model := self.controller.model) is not None:
            data["samples"] = [[c, h, s, model.seconds(c, h)] for c, h, s in self._probe.samples]
        return data

    def _load(self) -> None:
        if self._path is None or not os.path.exists(self._path):  # where it may not look there is none either
            return
        try:
            profile = load_profile(self._path, key=self._key)
            self._use(profile)
        except ProfileError as error:
            self._set_aside(error)
        except Exception as error:  # noqa: BLE001 - no stored file, of whatever version, may stop a start
            self.controller.use_model(None, None)
            self._set_aside(ProfileError(f"{self._path}: {type(error).__name__}: {error}"))

    def _use(self, profile: Profile) -> None:
        floors = profile.floors
        model = profile.model
        self.controller.use_model(model, "stored", (floors[0], floors[1]) if floors else None)
        logger.info("isochunk: using the stored profile %s: %s", self._path, model)

    def _set_aside(self, error: ProfileError) -> None:
        """Keep a profile that can't be used under another name, since this server will store its own.

        A file of the user's choice that is no profile may be anything, so it is left alone and nothing is stored.
        """
        assert self._path is not None
        if not os.access(self._path, os.R_OK):
            logger.warning("isochunk: %s; measuring without storing, since the file is another user's", error)
            self._path = None
            return
        if self._config.profile != "auto" and not is_profile(self._path):
            logger.warning("isochunk: %s; measuring without storing, since this file is not isochunk's", error)
            self._path = None
            return
        aside = self._path.with_name(f"{self._path.name}.refused")
        try:
            self._path.replace(aside)
        except OSError:  # left where it is; storing will say so again
            aside = self._path
        logger.warning("isochunk: %s; measuring again, the file is kept as %s", error, aside)

    def _store(self, fit: Fit, source: str) -> None:
        if self._path is None:
            return
        floors = self.controller.floors
        profile = Profile(model=fit.model, key=self._key, fit=fit.as_dict(), floors=floors, source=source)
        try:
            save_profile(self._path, profile)
        except ProfileError as error:
            logger.warning("isochunk: %s", error)

    def _run_probe(self, engine: Any) -> None:
        planner = self.controller.planner
        probe = self._probe = self._probing = Probe(
            chunks=self._probe_chunks(),
            max_chunk=planner.max_chunk,
            block=planner.block,
            stages=planner.stages,
            max_seconds=self._config.max_probe_seconds,
        )
        logger.info(
            "isochunk: probing sizes up to %d tokens and a prompt of %d, at most %.0f s (max_probe_seconds)",
            probe.max_chunk,
            sum(probe.chunks),
            probe.max_seconds,
        )
        fit = probe.run(lambda prompts: self._send(engine, prompts))
        logger.info("isochunk: the probe took %.1f s: %d steps, %d tokens", probe.seconds, probe.steps, probe.tokens)
        if probe.busy:
            logger.warning("isochunk: the machine was busy during the probe; the model will follow the traffic")
        if fit is None:
            return
        self.controller.use_model(fit.model, "probe")
        logger.info("isochunk: %s, %.1f%% off its samples", fit.model, 100 * fit.error)
        if engine.is_running() and not probe.busy:  # what was cut short or disturbed is measured again next time
            self._store(fit, "probe")

    def _probe_chunks(self) -> list[int]:
        """Steps of the longest probe prompt: what the model takes and nine tenths of the KV cache hold."""
        held = compat.kv_cache_tokens(self._scheduler)
        tokens = max(min(int(self._scheduler.max_model_len) - 1, held * 9 // 10), 1)
        planner = self.controller.planner
        return probe_chunks(tokens, planner.max_chunk, planner.block)

    def _send(self, engine: Any, prompts: dict[str, list[int]]) -> Steps:
        """Send prompts of random tokens through the engine, each cut as said; their steps."""
        probe = self._probing
        assert probe is not None
        scheduler = self._scheduler
        vocabulary = scheduler.vllm_config.model_config.get_vocab_size()
        random = np.random.default_rng()
        for key, chunks in prompts.items():
            scheduler.add_request(compat.probe_request(key, random.integers(0, vocabulary, sum(chunks)).tolist()))
        steps: Steps | None = None
        while engine.has_work() and engine.is_running():
            engine.step_fn()
            if probe.over and steps is None and len(came := self._steps(prompts)) >= probe.begun:
                steps = came  # what is given up is forgotten
                self._give_up()
            if probe.time_to_tell():
                logger.info("isochunk: probing, %s", probe.progress())
        steps = self._steps(prompts) if steps is None else steps
        for key in prompts:
            self.controller.log.take(key)
        return steps

    def _steps(self, keys: Iterable[str]) -> Steps:
        """The steps of these prompts that came out."""
        records = [self.controller.log.find(key) for key in keys]
        return [step for record in records if record is not None for step in record.steps]

    def _give_up(self) -> None:
        """Take the probe's prompts out of the scheduler; their steps in the pipeline still come out of it."""
        left = [key for key in self._scheduler.requests if key.startswith(PREFIX)]
        if left:
            self._scheduler.finish_requests(left, compat.aborted_status())

    def _drain(self, engine: Any) -> None:
        """Let the steps of a probe that failed come out of the engine, so that they are none of the first prompts'."""
        self._give_up()
        for _ in range(_DRAINED):
            if not engine.has_work():
                return
            with self.attempt("ending a step of the probe"):  # what made the probe fail may go on
                engine.step_fn()


def _profile_path(setting: str, key: dict[str, Any]) -> Path | None:
    if setting == "off":
        return None
    if setting != "auto":
        return Path(setting)
    try:
        return default_folder() / "profiles" / key_name(key)
    except ProfileError as error:
        logger.warning("isochunk: %s; measuring without storing", error)
        return None
