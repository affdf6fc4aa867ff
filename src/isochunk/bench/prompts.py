"""Prompts of exactly so many tokens."""

from __future__ import annotations

from isochunk.bench.client import Server
from isochunk.bench.text import Prose

__all__ = ["PromptMaker"]

_SPARE_CHARACTERS = 64


class PromptMaker:
    """Makes prompts of natural text, cut by the server's own tokenizer; no two share a beginning."""

    def __init__(self, server: Server, seed: int) -> None:
        self._server = server
        self._prose = Prose(seed)
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
            ids = await self._server.tokenize(text)
            if ids:
                self._characters_per_token = len(text) / len(ids)
        return ids[:tokens]
