"""Has vLLM's parser read a command; what it refuses becomes a finding and is left out, so that the rest is read too."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from isochunk.deployment.command import Word
from isochunk.deployment.draft import STAND_IN, Draft
from isochunk.deployment.given_options import GivenOption, all_flags, is_json, keys_of, name_of, options_of
from isochunk.deployment.option_table import Parsed, RefusedError, table

__all__ = ["Parser", "parse"]

_MOST_FAULTS = 12
_PLACEHOLDER = re.compile(r"<[A-Za-z][\w .-]*>|\.\.\.|\{\{.*\}\}")
# Gone in 0.32 at the latest; vLLM-Ascend is built on versions that have them.
_GONE_KEYS = frozenset(("kv_rank", "kv_parallel_size", "kv_buffer_size", "kv_ip"))
_GONE_OPTIONS = frozenset(
    (
        "--calculate-kv-scales",
        "--enable-bf16x3-router-gemm",
        "--enable-mamba-fine-grained-prefix-cache",
        "--max-long-partial-prefills",
        "--max-num-partial-prefills",
        "--override-attention-dtype",
    )
)


class Parser(Protocol):
    """Reads the arguments of ``vllm serve``."""

    vllm: str

    def parse(self, words: Sequence[str], env: Mapping[str, str]) -> Parsed:
        """What the words give, by vLLM's names; raises RefusedError when vLLM refuses them."""
        ...


def parse(draft: Draft, parser: Parser, words: list[Word]) -> tuple[Parsed, list[Word]]:
    """Parse; what vLLM refuses becomes a finding and is left out, so that the rest can be looked at."""
    for _ in range(_MOST_FAULTS):
        try:
            return parser.parse([str(word) for word in words], draft.serve.command.env), words
        except RefusedError as refused:
            fewer = _without_fault(draft, words, str(refused))
            if fewer == words:
                return {}, words
            words = fewer
    return {}, words


def _without_fault(draft: Draft, words: list[Word], message: str) -> list[Word]:
    unrecognized = re.match(r"unrecognized arguments: (.*)", message, re.DOTALL)
    if unrecognized:
        return _without_unrecognized(draft, words, unrecognized[1].split(" "))
    named = re.match(r"argument (\S+): (.*)", message, re.DOTALL) or re.match(r"ambiguous option: (\S+) (.*)", message)
    if not named:
        draft.find("refused", f"vLLM {draft.vllm} refuses it: {message}", "it does not start", "correct it")
        return words
    spellings = named[1].split("=")[0].split("/")
    dest = name_of(spellings[0])
    hit = [
        o for o in options_of(words) if o.dest.partition(".")[0] == dest or words[o.begin].split("=")[0] in spellings
    ]
    if not hit:
        draft.find("refused", f"vLLM {draft.vllm} refuses it: {message}", "it does not start", "correct it")
        return words
    _bad_value(draft, words, hit[-1], spellings[0], named[2])
    gone = {index for option in hit for index in range(option.begin, option.end)}
    return [word for index, word in enumerate(words) if index not in gone] + _rescued(draft, words, hit)


def _rescued(draft: Draft, words: list[Word], hit: Sequence[GivenOption]) -> list[Word]:
    """A ``--kv-transfer-config`` without the keys that vLLM refuses, so that the rest of it is checked too."""
    option = hit[-1]
    if option.dest != "kv_transfer_config":
        return []
    text = words[option.begin].partition("=")[2] or "".join(words[option.begin + 1 : option.end][:1])
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        draft.unknown.add("kv_transfer_config")
        return []
    if not isinstance(raw, dict):
        draft.unknown.add("kv_transfer_config")
        return []
    known = table()["configs"]["KVTransferConfig"]["properties"]
    kept = {key: value for key, value in raw.items() if key in known}
    if len(kept) == len(raw):
        draft.unknown.add("kv_transfer_config")
        return []
    return [Word("--kv-transfer-config"), Word(json.dumps(kept), words[option.begin].line)]


def _bad_value(draft: Draft, words: list[Word], option: GivenOption, spelling: str, message: str) -> None:
    part = words[option.begin : option.end]
    if any(str(STAND_IN) in word or _PLACEHOLDER.search(word) for word in part):
        draft.unknown.add(option.dest.partition(".")[0])
        return
    text = " ".join(message.split("For further information", maxsplit=1)[0].split())
    key = re.search(r"(\w+)(?:: Extra inputs are not permitted|\s+Unexpected keyword argument)", text)
    if option.dest == "kv_transfer_config" and key and key[1] in _GONE_KEYS:
        if draft.is_ascend(part):
            return
        draft.find(
            "unknown-option",
            f"--kv-transfer-config: {key[1]} is no key of vLLM {draft.vllm}",
            "vLLM 0.32 and later refuse it and do not start; before, it had no effect",
            f"drop {key[1]}",
            option="--kv-transfer-config",
            word=part[0],
        )
        return
    rule, remedy = "bad-value", f"see 'vllm serve --help={spelling.lstrip('-')}' for what it takes"
    if "JSON" in text or "json" in text or "cannot be converted" in text:
        rule, remedy = "not-json", "write JSON in '...', with \"...\" around keys and texts and no comma at the end"
    elif key:
        known = list(keys_of(option.dest))
        near = difflib.get_close_matches(key[1], known, n=1, cutoff=0.5)
        remedy = f"write {near[0]}" if near else f"drop {key[1]}"
    elif "ambiguous" in text or "could match" in text:
        remedy = "write the option out"
    elif "expected" in text:
        remedy = "give it a value"
    draft.find(
        rule,
        f"{' '.join(part)[:200]}: {text[:300]}",
        f"vLLM {draft.vllm} does not start",
        remedy,
        option=spelling,
        word=part[0],
    )


def _is_ascend(draft: Draft, part: Sequence[str]) -> bool:
    return (
        any("ascend" in str(word).lower() for word in draft.serve.arguments)
        or any(name.startswith(("ASCEND", "HCCL")) for name in draft.serve.command.env)
        or bool(
            re.search(r"MooncakeConnectorV1|MooncakeLayerwise|AscendStore|ConnectorStoreV1|\bnpu\b", " ".join(part))
        )
    )


def _without_stray(draft: Draft, kept: list[Word], at: int, word: Word) -> list[Word]:
    """Leave out a word of no option; where it is part of an option's JSON, leave that out too."""
    option = next((option for option in options_of(kept) if option.end == at and is_json(option.dest)), None)
    if option is None:
        if not any(finding.rule == "stray-word" for finding in draft.findings):
            why = f"vLLM {draft.vllm} does not start"
            remedy = "quote the value that it is part of, or drop it"
            draft.find("stray-word", f"{word!r} belongs to no option", why, remedy, word=word)
        return kept
    flag = kept[option.begin]
    draft.unknown.add(option.dest)
    draft.find(
        "not-json",
        f"{flag} {' '.join(kept[option.begin + 1 : option.end])} {word}: the shell cut it into words",
        f"vLLM {draft.vllm} does not start",
        "put the JSON in '...', with \"...\" around keys and texts",
        option=flag,
        word=flag,
    )
    return [*kept[: option.begin], *kept[option.end :]]


def _without_unrecognized(draft: Draft, words: list[Word], extra: list[str]) -> list[Word]:
    kept = list(words)
    for text in extra:
        hit = next((index for index, word in enumerate(kept) if word == text or word.replace("_", "-") == text), None)
        if hit is None:
            continue
        word = kept.pop(hit)
        if not word.startswith("-"):
            kept = _without_stray(draft, kept, hit, word)
            continue
        name = word.partition("=")[0]
        if name.replace("_", "-") not in _GONE_OPTIONS or not draft.is_ascend():
            _unknown_option(draft, name, word)
        # What stands behind it is its value, unless it may be the model.
        others = draft.serve.module or len(_positionals(kept)) > 1
        while hit < len(kept) and not kept[hit].startswith("-") and (kept[hit] in extra or others):
            kept.pop(hit)  # its value
            others = False
    return kept


def _unknown_option(draft: Draft, name: str, word: Word) -> None:
    flags = [flag for flag in all_flags() if flag.startswith("--")]
    near = difflib.get_close_matches(name.replace("_", "-"), flags, n=1, cutoff=0.6)
    draft.find(
        "unknown-option",
        f"{name} is no option of vLLM {draft.vllm}",
        "it does not start",
        f"did you mean {near[0]}? Else drop it" if near else "drop it",
        option=name,
        word=word,
    )


def _positionals(words: Sequence[str]) -> list[str]:
    covered = {index for option in options_of(words) for index in range(option.begin, option.end)}
    return [word for index, word in enumerate(words) if index not in covered]
