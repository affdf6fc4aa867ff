"""What a shell would put in place of ``$NAME``, ``${NAME:-default}``, ``$((a + 1))`` and ``$(seq 3)``."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping

from isochunk.deployment.command import UNKNOWN
from isochunk.deployment.shell import Token

__all__ = ["Value", "expand_text", "expand_token"]

Value = str | list[str]

_NAME = re.compile(r"\$(?:\{([^{}]*)\}|([A-Za-z_]\w*|[0-9@*#?$!-]))")
_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
               ast.Div: operator.floordiv, ast.Mod: operator.mod}  # fmt: skip
_LARGEST = 10**6


def expand_token(token: Token, variables: Mapping[str, Value]) -> list[str]:
    """The words that a word becomes: unquoted variables are split at blanks, arrays give their elements."""
    whole = _array(token, variables)
    if whole is not None:
        return whole
    words, begun = [""], False
    for piece in token.pieces:
        if piece.quote == "'":
            words[-1] += piece.text
            begun = True
            continue
        text = expand_text(piece.text, variables, quoted=bool(piece.quote))
        if piece.quote or text == piece.text:
            words[-1] += text
            begun = begun or bool(text) or bool(piece.quote)
            continue
        parts = re.split(r"[ \t\n]+", text)
        words[-1] += parts[0]
        words.extend(parts[1:])
        begun = begun or bool(text)
    return [word for word in words if word] if not any(piece.quote for piece in token.pieces) else words * begun


def _array(token: Token, variables: Mapping[str, Value]) -> list[str] | None:
    if len(token.pieces) != 1:
        return None
    found = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", token.pieces[0].text)
    if not found or token.pieces[0].quote == "'":
        return None
    value = variables.get(found[1])
    return list(value) if isinstance(value, list) else [UNKNOWN + found[1]] if value is None else value.split()


def expand_text(text: str, variables: Mapping[str, Value], *, quoted: bool = False) -> str:
    """Text with its variables replaced; what nobody can know here becomes UNKNOWN and its name."""
    text = re.sub(r"\$\(\((.*?)\)\)", lambda found: _calculate(found[1], variables), text, flags=re.DOTALL)
    text = _substitutions(text)
    text = _NAME.sub(lambda found: _variable(found[1] or found[2] or "", variables), text)
    return re.sub(r'\\([$`"\\])', r"\1", text) if quoted else text


def _substitutions(text: str) -> str:
    """``$(...)`` and backquotes: known only when they count."""
    parts, at = [], 0
    while (begin := text.find("$(", at)) >= 0:
        depth, end = 1, begin + 2
        while end < len(text) and depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        parts += [text[at:begin], _count(text[begin + 2 : end - 1])]
        at = end
    return re.sub(r"`[^`]*`", UNKNOWN + "command", "".join([*parts, text[at:]]))


def _count(command: str) -> str:
    found = re.fullmatch(r"\s*seq\s+(?:(\d{1,4})\s+)?(\d{1,4})\s*", command)
    return " ".join(map(str, range(int(found[1] or 1), int(found[2]) + 1))) if found else UNKNOWN + "command"


def _variable(inside: str, variables: Mapping[str, Value]) -> str:
    found = re.fullmatch(r"(\w+)(?:(:?[-=])(.*))?", inside, re.DOTALL)
    if not found:
        element = re.fullmatch(r"(\w+)\[(\w+)\]", inside)
        return _element(element[1], element[2], variables) if element else UNKNOWN + "expression"
    name, mode, default = found.groups()
    value = variables.get(name)
    if isinstance(value, list):
        value = " ".join(value)
    if value is None or (mode and mode.startswith(":") and not value):
        return expand_text(default, variables) if mode else UNKNOWN + name
    return value


def _element(name: str, index: str, variables: Mapping[str, Value]) -> str:
    value = variables.get(name)
    where = index if index.isdigit() else str(variables.get(index, ""))
    if isinstance(value, list) and where.isdigit() and int(where) < len(value):
        return value[int(where)]
    return UNKNOWN + name


def _calculate(expression: str, variables: Mapping[str, Value]) -> str:
    plain = expand_text(expression, variables)
    plain = re.sub(r"[A-Za-z_]\w*", lambda found: str(variables.get(found[0], UNKNOWN)), plain)
    try:
        return str(_number(ast.parse(plain.replace("/", "//").strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return UNKNOWN + "number"


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < _LARGEST:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return int(_ARITHMETIC[type(node.op)](_number(node.left), _number(node.right)))
    raise ValueError("not a plain number")
