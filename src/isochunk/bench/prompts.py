"""Prompts of exactly so many tokens."""

from __future__ import annotations

from random import Random

from isochunk.bench.client import Server
from isochunk.bench.text import Prose

__all__ = ["PromptMaker"]

_SPARE_CHARACTERS = 64
_PLAIN_IDS = range(256, 1024)  # ordinary tokens in every common vocabulary


class PromptMaker:
    """Makes prompts of natural text, cut by the server's own tokenizer; no two share a beginning.

    Where the server has no tokenizer to ask, as most proxies, prompts are random ordinary token ids.
    """

    def __init__(self, server: Server, seed: int) -> None:
        self._server = server
        self._prose = Prose(seed)
        self._random = Random(seed)
        self._characters_per_token = 5.0

    async def prompt(self, tokens: int) -> list[int]:
        """Token ids of a fresh prompt, exactly ``tokens`` of them."""
        paragraphs = self._prose.paragraphs()
        text = ""
        ids: list[int] = []
        while len(ids) < tokens:
            wanted = len(text) + (tokens - len(ids)) * self._characters_per_token + _SPARE_CHARACTERS
            while len(text) < wanted:
                text += next(paragraphs)
            told = await self._server.tokenize(text)
            if told is None:
                self._server.note(f"{self._server.url} has no /tokenize, so prompts were random token ids, not text")
                return self._random.choices(_PLAIN_IDS, k=tokens)
            ids = told
            if ids:
                self._characters_per_token = len(text) / len(ids)
        return ids[:tokens]
