"""What each step holds of each request, and the tokens that come out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, ModelRunnerOutput

from isochunk.vllm.probe import PREFIX
from isochunk.vllm.virtual.answers import Answer, Vocabulary, certain

__all__ = ["Share", "Speaker"]


@dataclass(frozen=True, slots=True)
class Share:
    """A step, as the clocks and the speaker need it.

    Attributes:
        keys: its requests, in vLLM's order.
        samples: those that get a token.
        chunks: new tokens of those that don't decode.
        histories: tokens before them.
        decodes: tokens before each decode.
        is_a_clients: whether any request is not the start-up probe's.
    """

    keys: list[str]
    samples: list[str]
    chunks: list[int]
    histories: list[int]
    decodes: list[int]
    is_a_clients: bool


class Speaker:
    """Keeps what is known of each request, and says its words.

    Args:
        model_config: vLLM's.
        most: tokens after which an answer ends by itself.
    """

    def __init__(self, model_config: Any, most: int) -> None:
        self._answers: dict[str, Answer] = {}
        self._tokens = int(model_config.get_vocab_size())
        tokenizer = None if model_config.skip_tokenizer_init else cached_tokenizer_from_config(model_config)
        self._vocabulary = Vocabulary(tokenizer, _end(model_config), most)

    def hear(self, scheduled: Any) -> Share | None:
        """Take in what vLLM scheduled; None when that is no step."""
        for key in scheduled.finished_req_ids:
            self._answers.pop(key, None)
        chunks = scheduled.num_scheduled_tokens
        if not chunks:
            return None
        histories = self._histories(scheduled)
        answers = self._answers
        decoding = {key for key in chunks if histories[key] >= answers[key].prompt and chunks[key] == 1}
        prompts = [key for key in chunks if key not in decoding]
        return Share(
            keys=list(chunks),
            samples=[key for key, chunk in chunks.items() if histories[key] + chunk >= answers[key].known],
            chunks=[chunks[key] for key in prompts],
            histories=[histories[key] for key in prompts],
            decodes=[histories[key] for key in chunks if key in decoding],
            is_a_clients=any(not key.startswith(PREFIX) for key in chunks),
        )

    def say(self, share: Share, grammar: Any) -> ModelRunnerOutput:
        """A token for each request of the step that gets one; ``grammar`` is vLLM's, if any request has one."""
        said = {key: self._answers[key].token(self._vocabulary) for key in share.samples}
        if grammar is not None:
            for key, row in zip(grammar.structured_output_request_ids, grammar.grammar_bitmask, strict=True):
                if key in said:
                    said[key] = Answer.allowed(np.asarray(row), said[key], self._vocabulary.end)
        return ModelRunnerOutput(
            req_ids=share.keys,
            req_id_to_index={key: at for at, key in enumerate(share.keys)},
            sampled_token_ids=[[said[key]] if key in said else [] for key in share.keys],
            logprobs=self._logprobs(share.keys, said),
            prompt_logprobs_dict={key: self._prompt_logprobs(key) for key in said if self._wants_prompt(key)},
        )

    def _histories(self, scheduled: Any) -> dict[str, int]:
        histories: dict[str, int] = {}
        for new in scheduled.scheduled_new_reqs:
            histories[new.req_id] = new.num_computed_tokens
            prompt = len(new.prompt_embeds if new.prompt_token_ids is None else new.prompt_token_ids)
            known = len(new.prefill_token_ids) if new.prefill_token_ids else prompt
            answer = self._answers[new.req_id] = Answer(prompt, known, new.sampling_params)
            if new.sampling_params.prompt_logprobs is not None:
                answer.prompt_tokens = new.prompt_token_ids
        cached = scheduled.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True)
        for key, history, outputs in rows:
            histories[key] = history
            self._answers[key].known = self._answers[key].prompt + outputs
        return histories

    def _wants_prompt(self, key: str) -> bool:
        """Whether this is the first token of a request that asks for its prompt's probabilities."""
        answer = self._answers[key]
        return answer.prompt_tokens is not None and answer.known == answer.prompt

    def _prompt_logprobs(self, key: str) -> LogprobsTensors:
        answer = self._answers[key]
        assert answer.prompt_tokens is not None
        most = self._candidates(answer.parameters.prompt_logprobs)
        return LogprobsTensors(*map(torch.from_numpy, certain(answer.prompt_tokens[1:], most)))

    def _logprobs(self, keys: list[str], said: dict[str, int]) -> LogprobsLists | None:
        """Of the tokens that were said, when a request asks for them: there is no doubt about any."""
        asked = [self._answers[key].parameters.logprobs for key in said]
        wanted = [self._candidates(count) for count in asked if count is not None]
        if not wanted:
            return None
        counts = [0]
        for key in keys:
            counts.append(counts[-1] + (key in said))
        return LogprobsLists(*certain([said[key] for key in keys if key in said], max(wanted)), counts)

    def _candidates(self, asked: int) -> int:
        """Tokens beside the chosen one; -1 asks for all."""
        return self._tokens - 1 if asked < 0 else asked


def _end(model_config: Any) -> int | None:
    end = getattr(model_config.hf_text_config, "eos_token_id", None)
    if isinstance(end, list):
        end = end[0] if end else None
    return None if end is None else int(end)
