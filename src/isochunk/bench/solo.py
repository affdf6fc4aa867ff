"""One prompt at a time on a server that should serve nobody else, and what spoils that."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from isochunk.bench.arms import Arm
from isochunk.bench.client import Answer, Server, Status
from isochunk.bench.prompts import PromptMaker
from isochunk.core.errors import BrokenAnswerError, ConfigError, ServerError

__all__ = ["PATIENCE_S", "Solo", "Turn", "check_lengths", "ended_by", "left_out", "policy_restored"]

PATIENCE_S = 60.0
"""Seconds for which a prompt is sent again while a server fails; enough for one that restarts quickly."""

_IDLE_SECONDS = 10.0
_RECORD_SECONDS = 5.0
_POLL_SECONDS = 0.05
_FIRST_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One prompt with its answer.

    Attributes:
        tokens: length of the prompt that was sent.
        arm: the policy it was sent under.
        answer: what the client saw.
        record: the server's own account of the prompt (chunks, step times, prediction).
        before: the idle server's status before the prompt was sent.
        after: its status when it first listed the prompt.
    """

    tokens: int
    arm: Arm
    answer: Answer
    record: dict[str, Any]
    before: Status
    after: Status

    @property
    def disturbed(self) -> str | None:
        """What makes its times worthless; None when nothing does."""
        record, after, arm = self.record, self.after, self.arm
        if record["cached"]:
            return f"prefix hit: {record['cached']} tokens were in the cache already (take another seed)"
        if record["tokens"] != self.tokens:
            return f"the server cut a prompt of {self.tokens} tokens to {record['tokens']}"
        if after["policy"] != arm.policy or after["chunk"] != arm.chunk:
            return f"somebody changed the policy to {after['policy']} {after['chunk'] or ''}".rstrip()
        if record["policy"] != arm.policy and arm.policy != "optimal":
            return "isochunk's guard used vLLM's own chunks in place of the policy's"
        steps = after["counters"]["steps"] - self.before["counters"]["steps"]
        if not record["alone"] or steps > len(record["chunks"]) + after["stages"]:
            return "other traffic on the server"
        return None


class Solo:
    """Sends fresh prompts, one at a time.

    Args:
        server: runs isochunk; its policy is switched and its status read.
        seed: of the prompts.
        front: where the prompts are sent when that is another server: a proxy in front of ``server``.
    """

    def __init__(self, server: Server, seed: int, *, front: Server | None = None) -> None:
        self._server = server
        self._front = front or server
        self._prompts = PromptMaker(server, seed)

    async def turn(self, tokens: int, arm: Arm, *, patience_s: float = 0.0) -> Turn:
        """Send one prompt under a policy when the server is idle.

        Args:
            patience_s: seconds for which a fresh prompt is sent again after a `BrokenAnswerError`, with growing pauses.

        Raises:
            ServerError: the server stays busy, or does not list the prompt, or keeps failing.
        """
        pause, until = _FIRST_PAUSE_S, None
        while True:
            try:
                return await self._turn(tokens, arm)
            except BrokenAnswerError as error:
                now = time.monotonic()
                until = now + patience_s if until is None else until
                if now >= until:
                    raise
                self._server.note(f"sent again after: {error}")
                await asyncio.sleep(min(pause, until - now))
                pause *= 2

    async def _turn(self, tokens: int, arm: Arm) -> Turn:
        prompt = await self._prompts.prompt(tokens)
        before = await self._idle()
        await self._server.use(arm.policy, arm.chunk)
        answer = await self._front.complete(prompt)
        after, record = await self._account(answer, tokens)
        return Turn(tokens=tokens, arm=arm, answer=answer, record=record, before=before, after=after)

    async def _account(self, answer: Answer, tokens: int) -> tuple[Status, dict[str, Any]]:
        for _ in range(int(_RECORD_SECONDS / _POLL_SECONDS)):
            status = await self._server.status(answer.request_id)
            for record in reversed(status["prompts"]):
                if answer.request_id in (record["request_id"] or ""):
                    return status, record
            await asyncio.sleep(_POLL_SECONDS)
        raise ServerError(
            f"{self._front.url} answered a prompt of {tokens} tokens but the status of {self._server.url} does not "
            "list it; did a proxy send it to another node, or is the server swamped with other requests?"
        )

    async def _idle(self) -> Status:
        for _ in range(int(_IDLE_SECONDS / _POLL_SECONDS)):
            status = await self._server.status()
            queue = status["queue"]
            if not queue["running"] and not queue["waiting"]:
                return status
            await asyncio.sleep(_POLL_SECONDS)
        raise BrokenAnswerError(
            f"{self._server.url} is busy with other requests ({queue['running']} running, {queue['waiting']} waiting); "
            "this measurement needs the server to itself: stop them and try again"
        )


async def check_lengths(server: Server, lengths: Sequence[int]) -> None:
    """Refuse lengths that don't fit the server.

    Raises:
        ConfigError: names the length and the server's limit.
    """
    limit = await server.max_model_len()
    for tokens in lengths:
        if tokens < 1 or (limit is not None and tokens + 1 > limit):
            raise ConfigError(
                f"length {tokens} must be from 1 to {'any' if limit is None else limit - 1}: the server takes "
                f"{limit} tokens (max_model_len), one of them for the answer"
            )


def left_out(reasons: Iterable[str | None]) -> list[str]:
    """What spoilt turns, with how many; None stands for a clean one."""
    counts = Counter(reason for reason in reasons if reason)
    return [f"{count} x left out: {reason}" for reason, count in sorted(counts.items())]


def ended_by(error: BaseException) -> str:
    """Why a measurement ends early, for whoever reads what it has so far. A cancellation (Ctrl-C) ends with it."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        return "interrupted"
    return "; ".join([str(error), *getattr(error, "__notes__", ())])


@asynccontextmanager
async def policy_restored(server: Server) -> AsyncIterator[Status]:
    """Gives the server's status as it is found, and puts its policy back at the end."""
    found = await server.status()
    try:
        yield found
    except BaseException as error:  # cancellation (Ctrl-C) too: somebody else's server is left as it was
        try:
            await server.use(found["policy"], found["chunk"])
        except ServerError as gone:
            error.add_note(f"the policy could not be put back to {found['policy']}: {gone}")
        raise
    await server.use(found["policy"], found["chunk"])
