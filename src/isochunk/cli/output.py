"""How commands print: a table for people, JSON for machines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from isochunk.core.errors import ConfigError

__all__ = ["JsonOption", "need_folder", "print_json", "print_table", "write_text"]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of a table.")]


def print_json(data: Any) -> None:
    """One JSON document on stdout."""
    json.dump(data, sys.stdout, indent=1)
    sys.stdout.write("\n")


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, justify: Literal["left", "right"] = "right"
) -> None:
    """A table on stdout; all columns but the first are numbers, right-aligned, unless ``justify`` says otherwise."""
    console = Console()
    console.print(title, highlight=False)
    table = Table()
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else justify, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def need_folder(path: Path) -> None:
    """Refuse, before a long measurement, a file that can't be written after it.

    Raises:
        ConfigError: its folder is not there or not open for writing.
    """
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"can't write {path}: {path.parent} is no folder you may write to")


def write_text(path: Path, text: str) -> None:
    """Write a result to a file.

    Raises:
        ConfigError: it can't be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error.strerror or error}; choose a folder you may write to") from error
