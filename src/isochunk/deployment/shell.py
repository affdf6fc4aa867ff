"""Shell text as tokens: words with their quotes and lines, and operators. Nothing is expanded here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from isochunk.core.errors import ConfigError
from isochunk.deployment.command import UNKNOWN

__all__ = ["Piece", "Token", "tokens"]

_OPERATORS = (
    "&&",
    "||",
    ";;",
    "((",
    "))",
    "<<<",
    "<<-",
    "<<",
    ">>",
    ">&",
    "<&",
    "&>",
    ";",
    "&",
    "|",
    "(",
    ")",
    "<",
    ">",
)
_BLANK = " \t\r"
_PLACEHOLDER = re.compile(r"<[A-Za-z](?:[\w ./:-]{0,60}[\w])?>")  # as guides write what the reader must fill in


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a word: its text as written, and the quotes around it (``'``, ``"`` or none)."""

    text: str
    quote: str = ""


@dataclass(frozen=True, slots=True)
class Token:
    """A word (its pieces) or an operator (``op``; a line's end is ``\\n``); ``glued`` to the word before it."""

    line: int
    pieces: tuple[Piece, ...] = ()
    op: str = ""
    glued: bool = False

    @property
    def bare(self) -> str:
        """A word's text when nothing of it is quoted, else nothing."""
        return "" if any(piece.quote for piece in self.pieces) else "".join(piece.text for piece in self.pieces)


def tokens(text: str, first_line: int = 1) -> list[Token]:
    """All tokens of a script.

    Raises:
        ConfigError: a quote or a bracket is not closed; names the line.
    """
    return _Scanner(text, first_line).run()


class _Scanner:
    def __init__(self, text: str, line: int) -> None:
        self.text, self.at, self.line = text, 0, line
        self.found: list[Token] = []
        self.pieces: list[Piece] = []
        self.bare = ""
        self.start = line
        self.heredocs: list[str] = []

    def run(self) -> list[Token]:
        while self.at < len(self.text):
            self._step()
        self._end_word()
        self.found.append(Token(self.line, op="\n"))
        return self.found

    def _step(self) -> None:
        char = self.text[self.at]
        if char == "\\":
            self._escape()
        elif char in "'\"":
            self._quoted(char)
        elif char in "$`":
            self._add(self._substitution())
        elif char in _BLANK:
            self._end_word()
            self.at += 1
        elif char == "\n":
            self._end_line()
        elif char == "#" and not self.bare and not self.pieces:
            end = self.text.find("\n", self.at)
            self.at = len(self.text) if end < 0 else end
        elif placeholder := _PLACEHOLDER.match(self.text, self.at):
            self.at = placeholder.end()
            self._mark(UNKNOWN + "placeholder")
        elif op := self._operator():
            glued = bool(self.bare or self.pieces)
            self._end_word()
            self.at += len(op)
            self.found.append(Token(self.line, op=op, glued=glued))
            if op in ("<<", "<<-"):
                self._heredoc_name()
        else:
            self._add(char)

    def _operator(self) -> str:
        return next((op for op in _OPERATORS if self.text.startswith(op, self.at)), "")

    def _add(self, text: str) -> None:
        if not self.bare and not self.pieces:
            self.start = self.line
        self.bare += text
        self.line += text.count("\n")
        self.at += len(text)

    def _mark(self, text: str) -> None:
        if not self.bare and not self.pieces:
            self.start = self.line
        self.bare += text

    def _escape(self) -> None:
        following = self.text[self.at + 1 : self.at + 2]
        if following == "\n" or self.text[self.at + 1 : self.at + 3] == "\r\n":
            self.at += 2 if following == "\n" else 3
            self.line += 1
            return
        if not self.bare and not self.pieces:
            self.start = self.line
        self._flush()
        self.pieces.append(Piece(following or "\\", "'"))
        self.at += 2

    def _quoted(self, quote: str) -> None:
        if not self.bare and not self.pieces:
            self.start = self.line
        self._flush()
        begin, where = self.line, self.at + 1
        end = where
        while end < len(self.text) and self.text[end] != quote:
            end += 2 if quote == '"' and self.text[end] == "\\" else 1
        if end >= len(self.text):
            raise ConfigError(f"line {begin}: the quote {quote} is never closed")
        inside = self.text[where:end]
        if quote == '"':
            inside = inside.replace("\\\n", "")
        self.pieces.append(Piece(inside, quote))
        self.line += self.text[where:end].count("\n")
        self.at = end + 1

    def _substitution(self) -> str:
        """A whole ``$NAME``, ``${...}``, ``$(...)`` or backquoted command, as written."""
        text, at = self.text, self.at
        if text[at] == "`":
            end = text.find("`", at + 1)
            if end < 0:
                raise ConfigError(f"line {self.line}: the quote ` is never closed")
            return text[at : end + 1]
        for opening, closing in (("$((", "))"), ("$(", ")"), ("${", "}")):
            if text.startswith(opening, at):
                return text[at : self._closing(at + len(opening), opening[-1], closing)]
        name = re.compile(r"\$(?:[A-Za-z_]\w*|[0-9@*#?$!-])?").match(text, at)
        return name[0] if name else "$"

    def _closing(self, at: int, opening: str, closing: str) -> int:
        depth = 1
        while at < len(self.text):
            if self.text.startswith(closing, at) and depth == 1:
                return at + len(closing)
            if self.text[at] == opening:
                depth += 1
            elif self.text[at] == closing[0]:
                depth -= 1
            at += 1
        raise ConfigError(f"line {self.line}: no {closing} closes the $... that begins there")

    def _flush(self) -> None:
        if self.bare:
            self.pieces.append(Piece(self.bare))
            self.bare = ""

    def _end_word(self) -> None:
        self._flush()
        if self.pieces:
            self.found.append(Token(self.start, tuple(self.pieces)))
            self.pieces = []

    def _heredoc_name(self) -> None:
        found = re.compile(r"[ \t]*(['\"\\]?)(\w+)\1").match(self.text, self.at)
        if found:
            self.heredocs.append(found[2])
            self.at = found.end()

    def _end_line(self) -> None:
        self._end_word()
        self.found.append(Token(self.line, op="\n"))
        self.at += 1
        self.line += 1
        while self.heredocs:
            name = self.heredocs.pop(0)
            found = re.compile(rf"(?:.*\n)*?[ \t]*{name}[ \t]*(?:\n|$)").match(self.text, self.at)
            end = found.end() if found else len(self.text)
            self.line += self.text.count("\n", self.at, end)
            self.at = end
