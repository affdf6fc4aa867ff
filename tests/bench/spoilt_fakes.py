"""Fake servers on which something spoils the measurement."""

from isochunk.bench.fake import FakePrefill


class Shared(FakePrefill):
    """Every fourth prompt runs beside somebody else's."""

    async def _prefill(self, tokens, cached, request_id, alone):
        await super()._prefill(tokens, cached, request_id, alone and len(self.received) % 4 != 0)


class Decoding(FakePrefill):
    """Somebody else's decode steps go on all the time."""

    async def _prefill(self, tokens, cached, request_id, alone):
        await super()._prefill(tokens, cached, request_id, alone)
        self.steps += 50


class Cutting(FakePrefill):
    def _answer(self, prompt, output, request_id):
        return super()._answer(prompt[:300], output, request_id)


class Meddling(FakePrefill):
    """Somebody else switches the policy under way."""

    async def _prefill(self, tokens, cached, request_id, alone):
        await super()._prefill(tokens, cached, request_id, alone)
        self.policy, self.chunk = "fixed", 640


class Guarded(FakePrefill):
    """Its guard leaves every prompt to vLLM's own chunks."""

    def _record(self, chosen, tokens, cached, entered):
        return super()._record(chosen, tokens, cached, entered) | {"policy": "fixed"}
