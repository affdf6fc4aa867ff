"""Who gets tokens in a step: vLLM's scheduler, with its KV cache, preemption and KV loads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING

from isochunk.core.steps import Prefill
from isochunk.simulator.kv import Holding, KVCache, Piece
from isochunk.simulator.share import ChunkPolicy, Chunks, Share
from isochunk.simulator.workload import Request

if TYPE_CHECKING:
    from isochunk.simulator.deployment import Deployment

__all__ = ["Part", "Prompt", "Queue", "Scheduler", "Step", "Steps"]

# As isochunk's part of vLLM's scheduler has them: of those that wait, it shows so many to the planner, looks the first
# up in the prefix cache at each step, and the others again after so many steps.
_SHOWN, _ANEW, _PATIENCE = 32, 4, 8


@dataclass(slots=True, eq=False)
class Prompt:
    """A request in an instance: what is computed and what is not.

    Attributes:
        history: tokens whose KV is computed, in the cache, or on its way in a step.
        answered: tokens that it has been answered with.
        in_flight: tokens in steps on their way; ``stale`` of them were there when it was last preempted.
        hit: tokens that it did not have to compute when its turn first came; None before that.
        prefilling: its last step, if there was one, left tokens of it to compute.
        loading: waits for its KV from elsewhere.
        looked: the scheduler's step in which its prefix hit was looked up, and found to be ``seen``.
        seconds: of work that the router counts until the first token.
    """

    request: Request
    arrived: float
    holding: Holding
    history: int = 0
    answered: int = 0
    in_flight: int = 0
    stale: int = 0
    hit: int | None = None
    preemptions: int = 0
    prefilling: bool = True
    running: bool = False
    done: bool = False
    loading: bool = False
    seconds: float = 0.0
    first_token: float = 0.0
    looked: int | None = None
    seen: int = 0

    @property
    def remaining(self) -> int:
        """Tokens that can be computed now."""
        return self.request.tokens + self.answered - self.history

    def prefill(self, now: float, history: int) -> Prefill:
        """What the planner sees of it."""
        remaining = self.request.tokens + self.answered - history
        return Prefill(self.request.key, history, remaining, now - self.arrived)


Part = tuple[Prompt, int, int]  # a prompt, its chunk, its history


@dataclass(slots=True, eq=False)
class Step:
    """One batch on its way.

    Attributes:
        parts: (prompt, chunk, history) of each prompt; decodes are among them, with a chunk of one token.
        seconds: on the slowest stage.
        prefills: whether it holds tokens of prompts.
        sampling: those who get a token at its end.
        stages: start and end on each stage, when recorded.
    """

    parts: list[Part] = field(default_factory=list)
    seconds: float = 0.0
    prefills: bool = False
    sampling: set[Prompt] = field(default_factory=set)
    stages: list[tuple[float, float]] = field(default_factory=list)

    def add(self, prompt: Prompt, chunk: int) -> None:
        """A part of the prompt goes into the step."""
        history = prompt.history
        self.prefills |= history < prompt.request.tokens
        self.parts.append((prompt, chunk, history))
        prompt.history += chunk
        prompt.in_flight += chunk
        prompt.prefilling = prompt.remaining > 0
        if not prompt.prefilling:
            self.sampling.add(prompt)


Steps = Sequence[Step]  # the oldest first


@dataclass(frozen=True, slots=True)
class Queue:
    """What a policy sees: prompts in the order in which they are served.

    Attributes:
        prefills: prompts with tokens left, those that have begun first, then the first that wait.
        begun: how many have begun.
        more: how many wait behind these.
        decodes: histories of those that want their next token.
    """

    prefills: list[Prefill]
    begun: int
    more: int
    decodes: list[int]


class Scheduler:
    """Running prompts in the order in which they began, then those that wait; each takes what it may.

    A prompt is let in when the KV cache has room for all of it. One that runs and finds no room for its next tokens
    preempts the last that began, which then starts anew, at the head of those that wait.

    Args:
        deployment: limits of a step, of the prompts that run, and of the KV cache.
        policy: chooses tokens.
    """

    def __init__(self, deployment: Deployment, policy: ChunkPolicy) -> None:
        self._limit, self._most = deployment.max_tokens, deployment.max_seqs
        self._loads = deployment.load_rate is not None
        self._policy = policy
        self._cache = KVCache(deployment.block, deployment.kv_blocks)
        self._running: list[Prompt] = []
        self._waiting: deque[Prompt] = deque()
        self._loaded: deque[Prompt] = deque()  # those that wait for their KV, or had it loaded
        self._steps = 0
        self._firsts = 0  # prompts whose prefix hits were looked up
        self.rehits = 0  # tokens that preempted prompts found in the cache
        self.started: list[tuple[Prompt, int]] = []  # loads begun in the last step, with their tokens

    def __len__(self) -> int:
        return len(self._running) + len(self._waiting) + len(self._loaded)

    def prompt(self, request: Request, now: float) -> Prompt:
        """What a request is here, before it is queued."""
        return Prompt(request, now, Holding(self._cache.content(request.blocks, request.unit, request.tokens)))

    def queue(self, prompt: Prompt) -> None:
        """The prompt waits for its turn; its prefix hit is looked up for the next step."""
        self._waiting.append(prompt)
        self._hit(prompt, self._steps + 1)

    def hit(self, request: Request) -> int:
        """Tokens of a request that need not be computed, as things stand; changes nothing."""
        if not request.blocks:
            return request.cached
        content = self._cache.content(request.blocks, request.unit, request.tokens)
        return _blocks(self._cache.look_up(content, (request.tokens - 1) // self._cache.block)) * self._cache.block

    def step(self, now: float, in_flight: Steps) -> Step | None:
        """The next step; None when nobody can take a token."""
        self.started = []
        if not self:
            return None
        self._steps += 1
        if self._policy.reorders and len(self._waiting) > 1:
            self._reorder(now)
        queue = self._queue(now)
        share = self._share(queue, in_flight, now)
        left = share.limit(len(queue.decodes), self._limit)
        if self._loads:
            left = min(left + 1, self._limit)  # those behind may still begin to load
        step = Step()
        left, preempted = self._go_on(step, share, left)
        if not preempted:
            self._let_in(step, share, left)
        if step.parts:
            return step
        if not share.aside:
            return None
        self._policy.refused()
        return self.step(now, in_flight)

    def _share(self, queue: Queue, in_flight: Steps, now: float) -> Share:
        """Ask the policy; anew, where one that would begin has KV to load first."""
        loads: set[str] = set()
        if self._loads:
            loads = {prompt.request.key for prompt in self._waiting if self._to_load(prompt, prompt.seen)}
        while queue.prefills:
            share = self._policy.share(queue, in_flight, now)
            if not loads or not isinstance(share, Chunks) or loads.isdisjoint(share.given):
                return share
            out = loads.intersection(share.given)
            queue.prefills[:] = [prefill for prefill in queue.prefills if prefill.key not in out]
        return Share()

    def result(self, step: Step) -> tuple[list[Prompt], list[Prompt]]:
        """A step has left the pipeline; returns those with their first token, and those that are done."""
        first, done = [], []
        for prompt, chunk, _ in step.parts:
            prompt.in_flight -= chunk
            if prompt.stale:
                prompt.stale -= chunk
            if prompt not in step.sampling:
                continue
            prompt.answered += 1
            if prompt.answered == 1:
                first.append(prompt)
            if prompt.answered == prompt.request.output:
                done.append(prompt)
                self._leave(prompt)
        return first, done

    def loaded(self, prompt: Prompt) -> None:
        """The KV of a prompt has come; its last token is computed in any case."""
        prompt.loading = False
        self._cache.keep(prompt.holding, prompt.history)
        prompt.history = min(prompt.history, prompt.request.tokens + prompt.answered - 1)

    def _leave(self, prompt: Prompt) -> None:
        prompt.done = True
        self._cache.release(prompt.holding)
        if prompt.running:
            self._running.remove(prompt)
        else:  # preempted after the step that ended it had begun
            self._waiting.remove(prompt)

    def _reorder(self, now: float) -> None:
        """Have the policy say in which order those that have not begun are served; preempted ones stay before them."""
        begun = [prompt for prompt in self._waiting if prompt.hit is not None]
        others = [prompt for prompt in self._waiting if prompt.hit is None]
        ranks = self._policy.ranks([prompt.prefill(now, self._hit(prompt, self._steps)) for prompt in others])
        order = sorted(range(len(others)), key=ranks.__getitem__)
        self._waiting = deque([*begun, *(others[at] for at in order)])

    def _queue(self, now: float) -> Queue:
        """As `isochunk.vllm.scheduler` tells it to the planner."""
        prefills: list[Prefill] = []
        decodes: list[int] = []
        for prompt in self._running:
            if prompt.remaining and prompt.prefilling:
                prefills.append(prompt.prefill(now, prompt.history))
            elif prompt.remaining:
                decodes.append(prompt.history)
        begun = len(prefills)
        left = self._limit - len(decodes) - sum(prefill.remaining for prefill in prefills)
        room = max(min(_SHOWN, self._most - len(self._running)), 0)
        ready = (prompt for prompt in chain(self._loaded, self._waiting) if not (prompt.loading or prompt.stale))
        for shown, prompt in enumerate(islice(ready, room)):
            prefills.append(prompt.prefill(now, self._hit(prompt, self._steps, anew=left > 0 and shown < _ANEW)))
            left -= prefills[-1].remaining
        shown = len(prefills) - begun
        loading = sum(prompt.loading for prompt in self._loaded)
        return Queue(prefills, begun, len(self._waiting) + len(self._loaded) - loading - shown, decodes)

    def _hit(self, prompt: Prompt, step: int, *, anew: bool = False) -> int:
        """Tokens of a waiting prompt that the planner knows to be there in a step."""
        if prompt.history:
            return prompt.history
        if prompt.remaining < self._cache.block:  # no block that could be found
            return 0 if self._loads else prompt.request.cached
        if prompt.looked is None or anew or step - prompt.looked >= _PATIENCE:
            first = prompt.looked is None
            self._firsts += first
            # Not all are looked up again in the same step.
            prompt.looked = step - (self._firsts % _PATIENCE if first else 0)
            found = _blocks(self._look_up(prompt)) * self._cache.block
            prompt.seen = found if self._loads else max(found, prompt.request.cached)
        return prompt.seen

    def _look_up(self, prompt: Prompt) -> list[Piece]:
        """Its cached blocks; the last token is always computed."""
        total = prompt.request.tokens + prompt.answered
        return self._cache.look_up(prompt.holding.content, (total - 1) // self._cache.block)

    def _to_load(self, prompt: Prompt, found: int) -> int:
        """Tokens that are not in this cache but elsewhere."""
        return 0 if prompt.history else max(prompt.request.cached - found, 0)

    def _go_on(self, step: Step, share: Share, left: int) -> tuple[int, bool]:
        """Those that run take tokens, in order; returns the tokens left and whether somebody was preempted."""
        at, preempted = 0, False
        while at < len(self._running) and left > 0:
            prompt = self._running[at]
            at += 1
            if not prompt.remaining or prompt.request.key in share.aside:
                continue
            chunk = min(prompt.remaining, left)
            if prompt.prefilling:
                chunk = share.chunk(prompt.request.key, prompt.history, prompt.remaining, left)
            if chunk <= 0:
                continue
            while not self._room(prompt, prompt.history + chunk):
                preempted = True
                if self._preempt() is prompt:
                    return left, True
            self._give(step, prompt, chunk)
            left -= chunk
        return left, preempted

    def _room(self, prompt: Prompt, tokens: int) -> bool:
        """Room for the first ``tokens`` tokens of one that runs, if there is any."""
        if self._cache.needed(prompt.holding, tokens) > self._cache.free:
            return False
        self._cache.grow(prompt.holding, tokens)
        return True

    def _give(self, step: Step, prompt: Prompt, chunk: int) -> None:
        step.add(prompt, chunk)
        self._cache.keep(prompt.holding, prompt.history)

    def _preempt(self) -> Prompt:
        """The last that began gives its blocks back and waits, before all others; what is in flight still counts."""
        prompt = self._running.pop()
        self._cache.release(prompt.holding)
        prompt.running, prompt.prefilling = False, True
        prompt.history = 0
        prompt.stale = prompt.in_flight
        prompt.preemptions += 1
        self._waiting.appendleft(prompt)
        return prompt

    def _let_in(self, step: Step, share: Share, left: int) -> None:
        """Those that wait begin, in order, until one finds no room; some are passed over."""
        passed: list[Prompt] = []
        loads: list[Prompt] = []
        while left > 0 and len(self._running) < self._most:
            queue = self._loaded or self._waiting
            if not queue:
                break
            prompt = queue[0]
            if prompt.loading or prompt.stale:  # its KV or its last token is still to come
                (loads if queue is self._loaded else passed).append(queue.popleft())
                continue
            found = [] if prompt.history else self._look_up(prompt)
            local = prompt.history or _blocks(found) * self._cache.block
            loaded = self._to_load(prompt, local)
            history = local + loaded
            anew = not prompt.history
            total = prompt.request.tokens + prompt.answered
            load = bool(loaded) and self._loads
            chunk = 0 if load else share.chunk(prompt.request.key, history, total - history, left)
            if not load and chunk <= 0:
                if self._loads:
                    (loads if queue is self._loaded else passed).append(queue.popleft())
                    continue
                break
            reserved = self._promised(loads) if load else 0
            if not self._enter(prompt, found, history + chunk, total, reserved):
                break
            queue.popleft()
            prompt.history = history
            if prompt.hit is None:
                prompt.hit = history
            elif anew:
                self.rehits += history
            if load:
                prompt.loading = True
                self.started.append((prompt, loaded))
                loads.append(prompt)
                continue
            prompt.running = True
            self._running.append(prompt)
            self._give(step, prompt, chunk)
            left -= chunk
        self._loaded.extendleft(reversed(loads))
        self._waiting.extendleft(reversed(passed))

    def _enter(self, prompt: Prompt, found: Sequence[Piece], tokens: int, total: int, reserved: int) -> bool:
        """Take blocks for the first ``tokens`` tokens, if there is room for all of the prompt."""
        cache, holding = self._cache, prompt.holding
        if cache.needed(holding, total, found) > cache.free:
            return False
        if cache.needed(holding, tokens, found) > cache.free - reserved:
            return False
        cache.grow(holding, tokens, found)
        return True

    def _promised(self, loads: Sequence[Prompt]) -> int:
        """Blocks that those who have begun, or had their KV loaded, still need for all of their tokens."""
        begun = chain((prompt for prompt in self._running if prompt.prefilling), self._loaded, loads)
        return sum(self._cache.needed(prompt.holding, prompt.request.tokens + prompt.answered) for prompt in begun)


def _blocks(pieces: Iterable[Piece]) -> int:
    return sum(high - low for _, low, high in pieces)
