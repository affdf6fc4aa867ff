"""What happens to a command's words before vLLM's parser sees them: files of options, blanks, and what nobody knows."""

from __future__ import annotations

import re
from typing import Any

from isochunk.core.errors import ConfigError
from isochunk.deployment.command import UNKNOWN, Word, is_unknown, locate
from isochunk.deployment.draft import STAND_IN, Draft
from isochunk.deployment.given_options import all_flags, is_json, options_of
from isochunk.deployment.marked_yaml import load_all
from isochunk.deployment.spelling import from_file

__all__ = ["known", "model_in_front", "with_file", "without_blanks", "without_unknown"]


def with_file(draft: Draft, words: list[Word]) -> list[Word]:
    """The options of a ``--config`` file in its place, as vLLM puts them: behind the model, before the rest."""
    joined = next((word for word in words if word.startswith("--config=")), None)
    if joined is not None:
        draft.find(
            "config-file",
            f"{joined}: vLLM reads the file only when its name is a word of its own",
            "the options of the file are left out without a word",
            "write --config FILE",
            option="--config",
            word=joined,
        )
        words = [word for word in words if word is not joined]
    if "--config" not in words:
        return words
    at = words.index(Word("--config"))
    rest = [*words[:at], *words[at + 2 :]]
    if at + 1 >= len(words):
        draft.find("config-file", "--config names no file", "vLLM stops", "name it", option="--config")
        return rest
    made = _file_words(draft, words[at + 1])
    first = 0 if not rest or rest[0].startswith("-") else 1
    if first and any(word == "--model" for word in made):  # the command's own model is kept
        where = made.index(Word("--model"))
        made = [*made[:where], *made[where + 2 :]]
    return [*rest[:first], *made, *rest[first:]]


def _file_words(draft: Draft, name: Word) -> list[Word]:
    try:
        text = locate(name, draft.near).read_text(encoding="utf-8")
    except (OSError, ValueError):
        draft.whole = False
        return []
    documents = load_all(text, str(name))
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise ConfigError(f"{name}: expected one mapping of vLLM's options")
    line = {key: getattr(value, "line", 0) for key, value in documents[0].items()}
    return [Word(word, line.get(word.removeprefix("--"), 0)) for word in from_file(documents[0], list(all_flags()))]


def without_blanks(draft: Draft, words: list[Word]) -> list[Word]:
    """A backslash before a blank makes the blank part of a word."""
    bad = [word for word in words if word != word.lstrip() and (not word.strip() or word.lstrip().startswith("-"))]
    if bad:
        draft.find(
            "blank-after-backslash",
            "a blank follows a backslash",
            "the backslash then makes the blank a word, or part of one, and joins no lines",
            "let the backslash be the last thing in its line",
            word=bad[0],
        )
    return [Word(word.strip(), word.line) if word in bad else word for word in words if word.strip() or word not in bad]


def without_unknown(draft: Draft, words: list[Word]) -> list[Word]:
    """Leave out what only the shell knows; inside JSON put a number in its place."""
    kept: list[Word] = []
    at, options = 0, {option.begin: option for option in options_of(words)}
    while at < len(words):
        option = options.get(at)
        if option is None:
            kept += _positional(draft, words[at], bool(kept))
            at += 1
            continue
        part = words[at : option.end]
        if not any(map(is_unknown, part)):
            kept += part
        elif is_json(option.dest):
            kept += [Word(_stand_ins(word), word.line) for word in part]
        else:
            draft.unknown.add(option.dest.partition(".")[0])
        at = option.end
    return kept


def _positional(draft: Draft, word: Word, later: bool) -> list[Word]:
    if word in ("...", "…"):  # as guides leave out what does not matter
        draft.whole = False
        return []
    if not is_unknown(word):
        return [word]
    if later or draft.serve.module or word.startswith(UNKNOWN + "@"):
        draft.whole = False
        return []
    draft.unknown.update(("model", "model_tag"))
    return [Word("unknown/model", word.line)]


def model_in_front(words: list[Word]) -> tuple[str, list[Word]]:
    """The value of ``--model``, and the words with it in front, where ``vllm serve`` puts it."""
    for index, word in enumerate(words):
        if word.startswith("--model="):
            model = Word(word.partition("=")[2], word.line)
            return model, [model, *words[:index], *words[index + 1 :]]
        if word == "--model" and index + 1 < len(words) and not words[index + 1].startswith("-"):
            return words[index + 1], [words[index + 1], *words[:index], *words[index + 2 :]]
    return "", words


def _stand_ins(text: str) -> str:
    return re.sub(rf"{UNKNOWN}\w*", str(STAND_IN), text)


def known(value: Any) -> Any:
    """None wherever a stand-in is."""
    if isinstance(value, dict):
        return {key: known(each) for key, each in value.items()}
    if isinstance(value, list):
        return [known(each) for each in value]
    return None if str(STAND_IN) in str(value) else value
