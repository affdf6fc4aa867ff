"""What the virtual model says: words of its tokenizer, always the same ones, as sure as can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Answer", "Vocabulary"]

_TEXT = " one two three four five six seven eight nine ten eleven twelve"
_NEVER = -9999.0  # vLLM's own number for a token that can't come


class Vocabulary:
    """Token ids that decode to text, and the one that ends an answer.

    Args:
        tokenizer: of the model; None when the server has none.
        end: the model's end-of-text token, if it names one.
        most: tokens after which an answer ends by itself.
    """

    def __init__(self, tokenizer: Any, end: int | None, most: int) -> None:
        self.end = end
        self.most = most
        words = tokenizer.encode(_TEXT, add_special_tokens=False) if tokenizer is not None else []
        special = {end, *(tokenizer.all_special_ids if tokenizer is not None else ())}
        self.words: Sequence[int] = [word for word in words if word not in special] or [0]


@dataclass(slots=True)
class Answer:
    """One request's answer.

    Attributes:
        prompt: tokens of its prompt.
        known: tokens that are known of it: the prompt, and what was sampled.
        parameters: vLLM's sampling parameters.
        prompt_tokens: kept when the request asks for their probabilities.
    """

    prompt: int
    known: int
    parameters: Any
    prompt_tokens: Sequence[int] | None = None

    def token(self, vocabulary: Vocabulary) -> int:
        """The next token: a word, one that the request allows, or the end."""
        at = self.known - self.prompt
        parameters = self.parameters
        ends = vocabulary.end is not None and at + 1 >= max(vocabulary.most, (parameters.min_tokens or 0) + 1)
        if ends and not parameters.ignore_eos and vocabulary.end is not None:
            return vocabulary.end
        allowed = parameters.allowed_token_ids
        words = allowed if allowed else vocabulary.words
        return int(words[at % len(words)])

    @staticmethod
    def allowed(row: np.ndarray, wanted: int, end: int | None) -> int:
        """A token that a grammar's bit mask ``row`` (int32, a bit a token) allows: the end, ``wanted``, or another."""
        for token in (end, wanted):
            if token is not None and token // 32 < len(row) and row[token // 32] >> (token % 32) & 1:
                return token
        word = int(np.flatnonzero(row)[0])
        bits = int(row[word]) & 0xFFFFFFFF
        return word * 32 + (bits & -bits).bit_length() - 1


def certain(tokens: Sequence[int], most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, log-probabilities and ranks of ``most`` candidates beside each sampled token, which is certain.

    Shapes (tokens, most + 1) twice and (tokens,).
    """
    chosen = np.array(tokens, dtype=np.int64)[:, None]
    others = np.broadcast_to(np.arange(most), (len(tokens), most))
    # From the first token that was chosen itself on, the others move by one.
    ids = np.concatenate([chosen, others + (others >= chosen)], axis=1)
    values = np.full(ids.shape, _NEVER, dtype=np.float32)
    values[:, 0] = 0.0
    return ids, values, np.ones(len(tokens), dtype=np.int64)
