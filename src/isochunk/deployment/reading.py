"""From commands to a deployment: the arguments of each node as vLLM reads them, and who is P and who is D."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from isochunk.core.errors import ConfigError
from isochunk.deployment.command import UNKNOWN, Place, Word, is_unknown
from isochunk.deployment.documents import Started
from isochunk.deployment.finding import Finding
from isochunk.deployment.front import read_front, with_roles
from isochunk.deployment.given_options import GivenOption, all_flags, is_json, keys_of, name_of, options_of
from isochunk.deployment.marked_yaml import load_all
from isochunk.deployment.model_shape import read_shape
from isochunk.deployment.node import Deployment, Node
from isochunk.deployment.option_table import Parsed, RefusedError, defaults, table
from isochunk.deployment.spelling import from_file
from isochunk.deployment.wrappers import Serve

__all__ = ["Parser", "ReadSection", "Section", "read_deployment"]

# Numbers that stand in JSON for what only the shell knows; nobody writes them.
_STAND_IN = 73_190_001
_MOST_FAULTS = 12
_PLACEHOLDER = re.compile(r"<[A-Za-z][\w .-]*>|\.\.\.|\{\{.*\}\}")
# Gone in 0.32 and without effect before; vLLM-Ascend is built on versions that have them.
_GONE_KEYS = frozenset(("kv_rank", "kv_parallel_size", "kv_buffer_size", "kv_ip"))


class Parser(Protocol):
    """Reads the arguments of ``vllm serve``."""

    vllm: str

    def parse(self, words: Sequence[str], env: Mapping[str, str]) -> Parsed:
        """What the words give, by vLLM's names; raises RefusedError when vLLM refuses them."""
        ...


class Section(Protocol):
    """isochunk's section of ``--additional-config``, read."""

    @property
    def enabled(self) -> bool:
        """Whether it switches isochunk on."""
        ...

    @property
    def min_chunk(self) -> int | None:
        """Floor of a chunk."""
        ...


ReadSection = Callable[[Any], Section]


def read_deployment(
    started: Iterable[Started],
    parser: Parser,
    section: ReadSection,
    *,
    near: Path = Path(),
    say: Callable[[str], None] = lambda text: None,
) -> Deployment:
    """All nodes and proxies, with their roles.

    Args:
        section: reads isochunk's section of an ``--additional-config``; raises ConfigError.
        near: folder from which relative paths count.
        say: told which node is being read.

    Raises:
        ConfigError: a model's configuration can't be read.
    """
    nodes: list[Node] = []
    fronts = []
    for index, each in enumerate(started):
        if isinstance(each, Serve):
            say(f"reading node {index + 1}")
            nodes.append(_Reader(each, parser, section, near).node(f"node {len(nodes) + 1}"))
        else:
            fronts.append(read_front(each))
    named = with_roles(nodes, fronts)
    return Deployment(nodes=tuple(_distinct(named)), fronts=tuple(fronts), vllm=parser.vllm)


def _distinct(nodes: Sequence[Node]) -> Iterator[Node]:
    """Nodes whose names are all different."""
    seen: dict[str, int] = {}
    for node in nodes:
        seen[node.name] = seen.get(node.name, 0) + 1
        name = node.name if seen[node.name] == 1 else f"{node.name} ({seen[node.name]})"
        yield replace(node, name=name, reading=tuple(finding.of(name) for finding in node.reading))


class _Reader:
    """Reads one node."""

    def __init__(self, serve: Serve, parser: Parser, section: ReadSection, near: Path) -> None:
        self.serve, self.parser, self.section, self.near = serve, parser, section, near
        self.findings: list[Finding] = [*serve.command.findings]
        self.unknown: set[str] = set()
        self.whole = True

    def node(self, name: str) -> Node:
        command = self.serve.command
        words = self._with_file(list(self.serve.arguments))
        words = self._without_blanks(words)
        lines = {option.dest: self._place(words[option.begin]) for option in options_of(words)}
        words = self._without_unknown(words)
        model_option, words = _model_option(words)
        given, words = self._parse(words)
        if model_option and self.serve.module:
            given["model"] = given.pop("model_tag", model_option)
        given = {key: _known(value) for key, value in given.items()}
        model = self._model(given)
        planning = self._planning(given)
        shape = read_shape(model, command.model_config, given.get("hf_overrides"), self.near)
        return Node(
            name=command.name or name,
            role=command.role or _role(given),
            program=self.serve.program,
            module=self.serve.module,
            model=model,
            given=given,
            defaults=defaults(),
            unknown=frozenset(self.unknown),
            whole=self.whole,
            lines=lines,
            env=command.env,
            host=command.host,
            published=command.published,
            devices=command.devices,
            clustered=command.clustered,
            foreground=command.foreground,
            image=command.image,
            contained=command.contained,
            device_gib=command.device_gib,
            place=command.place,
            shape=shape,
            reading=tuple(self.findings),
            words=tuple(map(str, words)),
            **planning,
        )

    def _planning(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Whether isochunk is on, as its own reader of the section says."""
        if "additional_config" in self.unknown:
            return {"plans": None}
        config = given.get("additional_config")
        if config is not None and not isinstance(config, Mapping):
            self._find(
                "not-json",
                f"--additional-config {config} is no object of JSON",
                "nobody finds a section in it",
                "write '{\"...\": ...}'",
                option="--additional-config",
            )
            return {"plans": None}
        try:
            section = self.section(config)
        except ConfigError as fault:
            return {"plans": None, "section_fault": str(fault)}
        on = section.enabled or (self.serve.program == "isochunk" and not _says_off(config))
        return {"plans": on or (False if self.whole else None), "min_chunk": section.min_chunk if on else None}

    def _model(self, given: Mapping[str, Any]) -> str | None:
        tag = None if self.serve.module else given.get("model_tag")
        model = tag if tag is not None else given.get("model")
        return model if isinstance(model, str) else None

    def _place(self, word: str) -> Place:
        line = getattr(word, "line", 0)
        return Place(self.serve.command.place.file, line or self.serve.command.place.line)

    def _find(self, rule: str, what: str, why: str, remedy: str, *, option: str = "", word: str = "") -> None:
        place = self._place(word)
        self.findings.append(
            Finding(
                level="error",
                rule=rule,
                node="",
                option=option or None,
                file=place.file,
                line=place.line,
                what=what,
                why=why,
                remedy=remedy,
            )
        )

    # Before the parser --------------------------------------------------------------------------------------------

    def _with_file(self, words: list[Word]) -> list[Word]:
        """The options of a ``--config`` file in its place, as vLLM puts them: behind the model, before the rest."""
        joined = next((word for word in words if word.startswith("--config=")), None)
        if joined is not None:
            self._find(
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
            self._find("config-file", "--config names no file", "vLLM stops", "name it", option="--config")
            return rest
        made = self._file_words(words[at + 1])
        first = 0 if not rest or rest[0].startswith("-") else 1
        if first and any(word == "--model" for word in made):  # the command's own model is kept
            where = made.index(Word("--model"))
            made = [*made[:where], *made[where + 2 :]]
        return [*rest[:first], *made, *rest[first:]]

    def _file_words(self, name: Word) -> list[Word]:
        try:
            text = (self.near / name).read_text(encoding="utf-8")
        except (OSError, ValueError):
            self.whole = False
            return []
        documents = load_all(text, str(name))
        if len(documents) != 1 or not isinstance(documents[0], dict):
            raise ConfigError(f"{name}: expected one mapping of vLLM's options")
        line = {key: getattr(value, "line", 0) for key, value in documents[0].items()}
        return [Word(word, line.get(word.removeprefix("--"), 0)) for word in from_file(documents[0], list(all_flags()))]

    def _without_blanks(self, words: list[Word]) -> list[Word]:
        """A backslash before a blank makes the blank part of a word."""
        bad = [word for word in words if word != word.lstrip() and (not word.strip() or word.lstrip().startswith("-"))]
        if bad:
            self._find(
                "blank-after-backslash",
                "a blank follows a backslash",
                "the backslash then makes the blank a word, or part of one, and joins no lines",
                "let the backslash be the last thing in its line",
                word=bad[0],
            )
        return [
            Word(word.strip(), word.line) if word in bad else word for word in words if word.strip() or word not in bad
        ]

    def _without_unknown(self, words: list[Word]) -> list[Word]:
        """Leave out what only the shell knows; inside JSON put a number in its place."""
        kept: list[Word] = []
        at, options = 0, {option.begin: option for option in options_of(words)}
        while at < len(words):
            option = options.get(at)
            if option is None:
                kept += self._positional(words[at], bool(kept))
                at += 1
                continue
            part = words[at : option.end]
            if not any(map(is_unknown, part)):
                kept += part
            elif is_json(option.dest):
                kept += [Word(_stand_ins(word), word.line) for word in part]
            else:
                self.unknown.add(option.dest.partition(".")[0])
            at = option.end
        return kept

    def _positional(self, word: Word, later: bool) -> list[Word]:
        if word in ("...", "…"):  # as guides leave out what does not matter
            self.whole = False
            return []
        if not is_unknown(word):
            return [word]
        if later or self.serve.module or word.startswith(UNKNOWN + "@"):
            self.whole = False
            return []
        self.unknown.update(("model", "model_tag"))
        return [Word("unknown/model", word.line)]

    # The parser ---------------------------------------------------------------------------------------------------

    def _parse(self, words: list[Word]) -> tuple[Parsed, list[Word]]:
        """Parse; what vLLM refuses becomes a finding and is left out, so that the rest can be looked at."""
        for _ in range(_MOST_FAULTS):
            try:
                return self.parser.parse([str(word) for word in words], self.serve.command.env), words
            except RefusedError as refused:
                fewer = self._without_fault(words, str(refused))
                if fewer == words:
                    return {}, words
                words = fewer
        return {}, words

    def _without_fault(self, words: list[Word], message: str) -> list[Word]:
        unrecognized = re.match(r"unrecognized arguments: (.*)", message, re.DOTALL)
        if unrecognized:
            return self._without_unrecognized(words, unrecognized[1].split(" "))
        named = re.match(r"argument (\S+): (.*)", message, re.DOTALL) or re.match(
            r"ambiguous option: (\S+) (.*)", message
        )
        if not named:
            self._find("refused", f"vLLM {self.parser.vllm} refuses it: {message}", "it does not start", "correct it")
            return words
        spellings = named[1].split("=")[0].split("/")
        dest = name_of(spellings[0])
        hit = [
            o
            for o in options_of(words)
            if o.dest.partition(".")[0] == dest or words[o.begin].split("=")[0] in spellings
        ]
        if not hit:
            self._find("refused", f"vLLM {self.parser.vllm} refuses it: {message}", "it does not start", "correct it")
            return words
        self._bad_value(words, hit[-1], spellings[0], named[2])
        gone = {index for option in hit for index in range(option.begin, option.end)}
        return [word for index, word in enumerate(words) if index not in gone] + self._rescued(words, hit)

    def _rescued(self, words: list[Word], hit: Sequence[GivenOption]) -> list[Word]:
        """A ``--kv-transfer-config`` without the keys that vLLM refuses, so that the rest of it is checked too."""
        option = hit[-1]
        if option.dest != "kv_transfer_config":
            return []
        text = words[option.begin].partition("=")[2] or "".join(words[option.begin + 1 : option.end][:1])
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError):
            self.unknown.add("kv_transfer_config")
            return []
        if not isinstance(raw, dict):
            self.unknown.add("kv_transfer_config")
            return []
        known = table()["configs"]["KVTransferConfig"]["properties"]
        kept = {key: value for key, value in raw.items() if key in known}
        if len(kept) == len(raw):
            self.unknown.add("kv_transfer_config")
            return []
        return [Word("--kv-transfer-config"), Word(json.dumps(kept), words[option.begin].line)]

    def _bad_value(self, words: list[Word], option: GivenOption, spelling: str, message: str) -> None:
        part = words[option.begin : option.end]
        if any(str(_STAND_IN) in word or _PLACEHOLDER.search(word) for word in part):
            self.unknown.add(option.dest.partition(".")[0])
            return
        text = " ".join(message.split("For further information", maxsplit=1)[0].split())
        key = re.search(r"(\w+)(?:: Extra inputs are not permitted|\s+Unexpected keyword argument)", text)
        if option.dest == "kv_transfer_config" and key and key[1] in _GONE_KEYS:
            if self._is_ascend(part):
                return
            self._find(
                "unknown-option",
                f"--kv-transfer-config: {key[1]} is no key of vLLM {self.parser.vllm}",
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
        self._find(
            rule,
            f"{' '.join(part)[:200]}: {text[:300]}",
            f"vLLM {self.parser.vllm} does not start",
            remedy,
            option=spelling,
            word=part[0],
        )

    def _is_ascend(self, part: Sequence[str]) -> bool:
        return (
            any("ascend" in str(word).lower() for word in self.serve.arguments)
            or any(name.startswith(("ASCEND", "HCCL")) for name in self.serve.command.env)
            or bool(
                re.search(r"MooncakeConnectorV1|MooncakeLayerwise|AscendStore|ConnectorStoreV1|\bnpu\b", " ".join(part))
            )
        )

    def _without_stray(self, kept: list[Word], at: int, word: Word) -> list[Word]:
        """Leave out a word of no option; where it is part of an option's JSON, leave that out too."""
        option = next((option for option in options_of(kept) if option.end == at and is_json(option.dest)), None)
        if option is None:
            if not any(finding.rule == "stray-word" for finding in self.findings):
                why = f"vLLM {self.parser.vllm} does not start"
                remedy = "quote the value that it is part of, or drop it"
                self._find("stray-word", f"{word!r} belongs to no option", why, remedy, word=word)
            return kept
        flag = kept[option.begin]
        self.unknown.add(option.dest)
        self._find(
            "not-json",
            f"{flag} {' '.join(kept[option.begin + 1 : option.end])} {word}: the shell cut it into words",
            f"vLLM {self.parser.vllm} does not start",
            "put the JSON in '...', with \"...\" around keys and texts",
            option=flag,
            word=flag,
        )
        return [*kept[: option.begin], *kept[option.end :]]

    def _without_unrecognized(self, words: list[Word], extra: list[str]) -> list[Word]:
        kept = list(words)
        for text in extra:
            hit = next(
                (index for index, word in enumerate(kept) if word == text or word.replace("_", "-") == text), None
            )
            if hit is None:
                continue
            word = kept.pop(hit)
            if not word.startswith("-"):
                kept = self._without_stray(kept, hit, word)
                continue
            name = word.partition("=")[0]
            flags = [flag for flag in all_flags() if flag.startswith("--")]
            near = difflib.get_close_matches(name.replace("_", "-"), flags, n=1, cutoff=0.6)
            self._find(
                "unknown-option",
                f"{name} is no option of vLLM {self.parser.vllm}",
                "it does not start",
                f"did you mean {near[0]}? Else drop it" if near else "drop it",
                option=name,
                word=word,
            )
            # What stands behind it is its value, unless it may be the model.
            others = self.serve.module or len(_positionals(kept)) > 1
            while hit < len(kept) and not kept[hit].startswith("-") and (kept[hit] in extra or others):
                kept.pop(hit)  # its value
                others = False
        return kept


def _positionals(words: Sequence[str]) -> list[str]:
    covered = {index for option in options_of(words) for index in range(option.begin, option.end)}
    return [word for index, word in enumerate(words) if index not in covered]


def _model_option(words: list[Word]) -> tuple[str, list[Word]]:
    """The value of ``--model``, and the words with it in front, where ``vllm serve`` puts it."""
    for index, word in enumerate(words):
        if word.startswith("--model="):
            model = Word(word.partition("=")[2], word.line)
            return model, [model, *words[:index], *words[index + 1 :]]
        if word == "--model" and index + 1 < len(words) and not words[index + 1].startswith("-"):
            return words[index + 1], [words[index + 1], *words[:index], *words[index + 2 :]]
    return "", words


def _stand_ins(text: str) -> str:
    return re.sub(rf"{UNKNOWN}\w*", str(_STAND_IN), text)


def _known(value: Any) -> Any:
    """None wherever a stand-in is."""
    if isinstance(value, dict):
        return {key: _known(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_known(each) for each in value]
    return None if str(_STAND_IN) in str(value) else value


def _says_off(config: Any) -> bool:
    """Whether a section says by itself that isochunk is off, which ``isochunk serve`` respects."""
    for key in ("scheduler_config", "profiling_chunk_config", "enabled"):
        config = config.get(key) if isinstance(config, Mapping) else None
    return config is False


def _role(given: Mapping[str, Any]) -> str | None:
    config = given.get("kv_transfer_config")
    role = config.get("kv_role") if isinstance(config, Mapping) else None
    inner = config.get("kv_connector_extra_config") if isinstance(config, Mapping) else None
    roles = {role}
    if isinstance(inner, Mapping) and isinstance(inner.get("connectors"), list):
        roles |= {each.get("kv_role") for each in inner["connectors"] if isinstance(each, Mapping)}
    found = {"prefill" for each in roles if each == "kv_producer"} | {
        "decode" for each in roles if each == "kv_consumer"
    }
    return found.pop() if len(found) == 1 else None
