"""Deployments read by the table, for tests."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

from isochunk.deployment.documents import Started, read_text
from isochunk.deployment.finding import Finding
from isochunk.deployment.node import Deployment, Node
from isochunk.deployment.option_table import TableParser
from isochunk.deployment.reading import read_deployment
from isochunk.deployment.rules import check
from isochunk.vllm.config import read_config

__all__ = ["deployment_of", "found", "node", "parser", "read"]


@functools.cache
def parser() -> TableParser:
    return TableParser()


def deployment_of(started: Iterable[Started], near: Path = Path()) -> Deployment:
    return read_deployment(started, parser(), read_config, near=near)


def read(text: str, file: str = "run.sh", near: Path = Path()) -> Deployment:
    return deployment_of(read_text(text, file), near)


def node(text: str, file: str = "run.sh", near: Path = Path()) -> Node:
    (made,) = read(text, file, near).nodes
    return made


def found(text: str, file: str = "run.sh", near: Path = Path()) -> list[Finding]:
    return check(read(text, file, near))
