"""YAML in which every text knows its line and its style."""

from __future__ import annotations

from typing import Any

from isochunk.core.errors import ConfigError

__all__ = ["Text", "load_all"]

_DEEPEST = 60
_MOST = 20_000


class Text(str):
    """A scalar that was text: where its content begins, and ``|``, ``>``, a quote or nothing."""

    __slots__ = ("line", "style")
    line: int
    style: str

    def __new__(cls, text: str, line: int, style: str) -> Text:
        """Text with its place."""
        made = super().__new__(cls, text)
        made.line, made.style = line, style
        return made


def load_all(text: str, file: str) -> list[Any]:
    """All documents of a YAML text: mappings, lists, numbers, and `Text` for what is text.

    Raises:
        ConfigError: PyYAML is not installed, or it is no YAML.
    """
    try:
        import yaml
    except ImportError:
        raise ConfigError("reading YAML needs PyYAML: pip install 'isochunk[proxy]'") from None
    try:
        loader = yaml.SafeLoader(text)
        try:
            documents = []
            while loader.check_node():
                documents.append(_Maker(loader, file).make(loader.get_node(), 0))
            return documents
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}:" if mark is not None else ""
        raise ConfigError(f"{file}:{where} not readable as YAML: {getattr(error, 'problem', None) or error}") from None
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{file}: not readable as YAML: {error}") from None


class _Maker:
    def __init__(self, loader: Any, file: str) -> None:
        self.loader, self.file, self.made = loader, file, 0

    def make(self, node: Any, depth: int) -> Any:
        self.made += 1
        if depth > _DEEPEST or self.made > _MOST:
            raise ConfigError(f"{self.file}: nested too deeply, or too large, to be a deployment")
        kind = type(node).__name__
        if kind == "MappingNode":
            self.loader.flatten_mapping(node)
            return {_key(self.make(key, depth + 1)): self.make(value, depth + 1) for key, value in node.value}
        if kind == "SequenceNode":
            return [self.make(each, depth + 1) for each in node.value]
        if node.tag == "tag:yaml.org,2002:str":
            block = node.style in ("|", ">")
            return Text(node.value, node.start_mark.line + (2 if block else 1), node.style or "")
        if node.tag in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:binary") or "yaml.org" not in node.tag:
            return Text(str(node.value), node.start_mark.line + 1, "")
        if node.tag == "tag:yaml.org,2002:int" and ":" in node.value:
            return Text(node.value, node.start_mark.line + 1, "")  # 8000:8000 is no number to base 60 here
        return self.loader.construct_object(node)


def _key(value: Any) -> str:
    return str(value)
