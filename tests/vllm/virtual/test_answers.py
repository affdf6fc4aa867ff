from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from isochunk.cli.rehearsed import tiny_model
from isochunk.vllm.virtual.answers import Answer, Vocabulary, certain


def bits(*tokens: int) -> Any:
    row = np.zeros(40, dtype=np.int32)
    for token in tokens:
        row[token // 32] |= np.uint32(1 << token % 32).astype(np.int32)
    return row


def test_a_grammar_has_the_last_word() -> None:
    assert Answer.allowed(bits(3, 77, 31), 77, end=5) == 77
    assert Answer.allowed(bits(3, 5, 77), 77, end=5) == 5
    assert Answer.allowed(bits(31, 1000), 77, end=5) == 31
    assert Answer.allowed(bits(1000), 77, end=None) == 1000


def test_certain_tokens_come_first_and_once() -> None:
    ids, values, ranks = certain([2, 9], 3)
    assert ids.tolist() == [[2, 0, 1, 3], [9, 0, 1, 2]]
    assert values[:, 0].tolist() == [0.0, 0.0]
    assert ranks.tolist() == [1, 1]


def test_the_tiny_models_words_are_text_and_so_are_random_ids() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model())
    words = Vocabulary(tokenizer, 1, 10).words
    assert tokenizer.decode(words).startswith(" one two three four")
    # Prompts of tests and benchmarks are ids from 100 to 40 000: none is half a character.
    assert all("\ufffd" not in tokenizer.decode([token]) for token in range(2, 40_000, 7))
    text = "Wörld, 漢字, naïve?"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_answer_ends_when_it_should() -> None:
    vocabulary = Vocabulary(None, 1, 3)
    parameters = SimpleNamespace(min_tokens=0, ignore_eos=False, allowed_token_ids=None)
    assert Answer(10, 11, parameters).token(vocabulary) != 1
    assert Answer(10, 12, parameters).token(vocabulary) == 1
