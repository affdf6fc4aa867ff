"""A shell script as the commands that it would start: variables, exports, arrays, loops and functions followed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from isochunk.core.errors import ConfigError
from isochunk.deployment.command import UNKNOWN, Command, Place, Word
from isochunk.deployment.expansion import Value, expand_text, expand_token
from isochunk.deployment.finding import Finding
from isochunk.deployment.option_table import table
from isochunk.deployment.shell import Token, tokens

__all__ = ["read_script"]

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)(.*)", re.DOTALL)
_ENDS = frozenset(("\n", ";", ";;", "&", "&&", "||", "|"))
_REDIRECTIONS = frozenset((">", ">>", "<", ">&", "<&", "&>", "<<<"))
_WORDS_OF_THE_SHELL = frozenset(
    ("if", "then", "else", "elif", "fi", "while", "until", "do", "done", "{", "}", "!", "time")
)
# Beside vLLM's own, which the table lists.
_MATTERS = re.compile(r"(UCX|NIXL|MC|LMCACHE|HCCL|VLLM_ASCEND)_[A-Z_]+|(CUDA|ASCEND_RT|HIP|ROCR)_VISIBLE_DEVICES")
_CLUSTER = re.compile(r"\bray\s+(start|status|init)\b|\bray_(address|cluster_size|init)|multi-node-serving")
_DEEPEST, _MOST = 12, 400


def read_script(text: str, file: str, *, first_line: int = 1, env: Mapping[str, str] | None = None) -> list[Command]:
    """The commands of a script in the order in which they start.

    Raises:
        ConfigError: a quote or bracket is open, or loops go on for too long.
    """
    run = _Run(file, dict(env or {}))
    run.block(tokens(text, first_line), 0)
    clustered = _CLUSTER.search(text) is not None
    return [replace(command, clustered=True) for command in run.commands] if clustered else run.commands


class _Run:
    def __init__(self, file: str, env: dict[str, str]) -> None:
        self.file = file
        self.variables: dict[str, Value] = dict(env)
        self.exported = set(env)
        self.lines: dict[str, int] = {}
        self.functions: dict[str, list[Token]] = {}
        self.export_all = False
        self.commands: list[Command] = []

    def block(self, stream: Sequence[Token], depth: int) -> None:
        if depth > _DEEPEST:
            raise ConfigError(f"{self.file}: loops and functions are nested too deeply to follow")
        at = 0
        while at < len(stream):
            at = self._statement(stream, at, depth)
            if len(self.commands) > _MOST:
                raise ConfigError(f"{self.file}: more than {_MOST} commands")

    def _statement(self, stream: Sequence[Token], at: int, depth: int) -> int:
        word = stream[at].bare
        if word == "for":
            return self._loop(stream, at, depth)
        if word == "case":
            return _after(stream, at, "case", "esac")
        name = at + 1 if word == "function" else at
        named = name + 2 < len(stream) and re.fullmatch(r"[\w:.-]+", stream[name].bare)
        if named and stream[name + 1].op == "(" and stream[name + 2].op == ")":
            return self._function(stream, name, name + 3)
        if word == "function":
            return self._function(stream, name, name + 1)
        if stream[at].op or word in _WORDS_OF_THE_SHELL:
            return at + 1
        end = at
        while end < len(stream) and stream[end].op not in _ENDS:
            end += self._array(stream, end) or 1
        before = len(self.commands)
        self._simple(stream[at:end], depth)
        if end < len(stream) and stream[end].op in ("\n", ";"):
            self.commands[before:] = [replace(command, foreground=True) for command in self.commands[before:]]
        return end

    def _array(self, stream: Sequence[Token], at: int) -> int:
        """Length of ``NAME=( ... )``, which goes over lines; 0 when there is none."""
        opens = at + 1 < len(stream) and stream[at + 1].op == "(" and stream[at + 1].glued
        if not opens or not re.fullmatch(r"\w+\+?=", stream[at].bare):
            return 0
        end = at + 2
        while end < len(stream) and stream[end].op != ")":
            end += 1
        return end + 1 - at

    def _loop(self, stream: Sequence[Token], at: int, depth: int) -> int:
        do = next((i for i in range(at, len(stream)) if stream[i].bare == "do"), len(stream))
        end = _after(stream, do, "do", "done")
        body = stream[do + 1 : end - 1]
        for name, value in self._turns(stream[at + 1 : do]):
            self.variables[name] = value
            self.block(body, depth + 1)
        return max(end, at + 1)

    def _turns(self, head: Sequence[Token]) -> list[tuple[str, str]]:
        if len(head) > 1 and head[1].bare == "in":
            words = [word for token in head[2:] if not token.op for word in self._words(token)]
            ranges = [_braces(word) for word in words]
            return [(head[0].bare, word) for each in ranges for word in each]
        text = "".join(t.op or "".join(p.text for p in t.pieces) for t in head)
        found = re.match(r"\(\((\w+)=([^;<]+);\1<(=?)([^;]+);", text.replace(" ", ""))
        if not found:
            return [("", "")]
        begin, end = (expand_text(f"$(({each}))", self.variables) for each in (found[2], found[4]))
        if not (begin.isdigit() and end.isdigit() and int(end) - int(begin) < _MOST):
            return [(found[1], UNKNOWN + found[1])]
        return [(found[1], str(i)) for i in range(int(begin), int(end) + bool(found[3]))]

    def _function(self, stream: Sequence[Token], name: int, at: int) -> int:
        start = next((i for i in range(at, len(stream)) if stream[i].bare == "{"), len(stream))
        end = _after(stream, start, "{", "}")
        if name < len(stream):
            self.functions[stream[name].bare] = list(stream[start + 1 : end - 1])
        return max(end, at)

    def _words(self, token: Token) -> list[Word]:
        return [Word(text, token.line) for text in expand_token(token, self.variables)]

    def _simple(self, statement: Sequence[Token], depth: int) -> None:
        """Assignments, then a command's words, without redirections."""
        local: dict[str, Value] = {}
        words: list[Word] = []
        at, declares = 0, False
        while at < len(statement):
            token = statement[at]
            length = self._array(statement, at)
            if length:
                name = token.bare.rstrip("+=")
                inside = [str(w) for t in statement[at + 2 : at + length - 1] if not t.op for w in self._words(t)]
                before = self.variables.get(name, [])
                grows = token.bare.endswith("+=") and isinstance(before, list)
                self.variables[name] = [*before, *inside] if grows and isinstance(before, list) else inside
                at += length
                continue
            if token.op in _REDIRECTIONS:
                if token.glued and words and words[-1].isdigit() and len(words[-1]) == 1:
                    words.pop()
                at += 2
                continue
            at += 1
            if token.op:
                continue
            found = _ASSIGNMENT.fullmatch(token.pieces[0].text) if not token.pieces[0].quote else None
            if found and (declares or not words):
                self._assign(found[1], found[2], token, local, exported=declares)
            elif not words and token.bare in ("export", "declare", "readonly", "local", "typeset"):
                declares = declares or token.bare == "export"
                local.clear()
                words_of_declaration = statement[at:]
                self._declare(words_of_declaration, exported=token.bare == "export")
                return
            else:
                words += self._words(token)
        if words:
            self._run(words, local, depth)
        else:
            self.variables.update(local)

    def _declare(self, rest: Sequence[Token], *, exported: bool) -> None:
        for token in rest:
            found = _ASSIGNMENT.fullmatch(token.pieces[0].text) if token.pieces and not token.pieces[0].quote else None
            if found:
                kept: dict[str, Value] = {}
                self._assign(found[1], found[2], token, kept, exported=exported)
                self.variables.update(kept)
            elif exported and re.fullmatch(r"\w+", token.bare):
                self.exported.add(token.bare)

    def _assign(self, name: str, how: str, token: Token, local: dict[str, Value], *, exported: bool) -> None:
        text = "".join(
            p.text if p.quote == "'" else expand_text(p.text, {**self.variables, **local}, quoted=bool(p.quote))
            for p in token.pieces
        )[len(name) + len(how) :]
        before = self.variables.get(name, "")
        local[name] = before + text if how == "+=" and isinstance(before, str) else text
        self.lines[name] = token.line
        if exported or self.export_all:
            self.exported.add(name)

    def _run(self, words: list[Word], local: Mapping[str, Value], depth: int) -> None:
        if words[0] in ("cd", "echo", "sleep", "wait", "kill", "printf", "source", ".", "mkdir", "curl", "shift"):
            return
        if words[0] == "set" and (words[1:2] == ["-a"] or "allexport" in words):
            self.export_all = True
            return
        if words[0] in self.functions:
            self._call(words, local, depth)
            return
        if words[0].startswith("-") and self.commands:
            self._continue(words)
            return
        shown = {name: value for name, value in self.variables.items() if name in self.exported}
        env = {name: value for name, value in {**shown, **local}.items() if isinstance(value, str)}
        hidden = [self._hidden(name) for name in self.variables if name not in env and _matters(name)]
        place = Place(self.file, words[0].line)
        self.commands.append(Command(words=tuple(words), env=env, place=place, findings=tuple(hidden)))

    def _continue(self, words: list[Word]) -> None:
        """Options that begin a line belong to the command before, where its author wanted them."""
        last = self.commands.pop()
        blank = not last.words[-1].strip()  # the blank behind a backslash, which is said elsewhere
        findings = last.findings if blank else (*last.findings, _cut_off(self.file, words[0]))
        self.commands.append(replace(last, words=(*last.words, *words), findings=findings))

    def _hidden(self, name: str) -> Finding:
        return Finding(
            level="error",
            rule="not-exported",
            node="",
            option=name,
            file=self.file,
            line=self.lines.get(name, 0),
            what=f"{name} is set and not exported",
            why="the server that starts later does not see it",
            remedy=f"write 'export {name}=...'",
        )

    def _call(self, words: list[Word], local: Mapping[str, Value], depth: int) -> None:
        """A function's own arguments end with it; what else it sets stays, as in a shell."""
        arguments: dict[str, Value] = {str(i): str(word) for i, word in enumerate(words)}
        arguments["@"] = [str(word) for word in words[1:]]
        arguments.update(local)
        before = {name: self.variables[name] for name in arguments if name in self.variables}
        exported = set(local) - self.exported
        self.variables.update(arguments)
        self.exported |= exported
        self.block(self.functions[words[0]], depth + 1)
        self.exported -= exported
        for name in arguments:
            self.variables.pop(name, None)
        self.variables.update(before)


def _matters(name: str) -> bool:
    return name in table()["environment"] or _MATTERS.fullmatch(name) is not None


def _after(stream: Sequence[Token], at: int, opens: str, closes: str) -> int:
    """Behind the word that closes what opens at ``at``."""
    depth = 0
    while at < len(stream):
        depth += {opens: 1, closes: -1}.get(stream[at].bare, 0)
        at += 1
        if depth == 0:
            break
    return at


def _braces(word: str) -> list[str]:
    found = re.fullmatch(r"\{(\d{1,3})\.\.(\d{1,3})\}", word)
    return [str(i) for i in range(int(found[1]), int(found[2]) + 1)] if found else [word]


def _cut_off(file: str, word: Word) -> Finding:
    return Finding(
        level="error",
        rule="cut-off",
        node="",
        option=word.partition("=")[0],
        file=file,
        line=word.line,
        what=f"the command ends before {word}, and the shell takes {word} for a command of its own",
        why="the server starts without this option and all that follow",
        remedy="end the line before it with a backslash, with nothing behind the backslash, and no comment between",
    )
