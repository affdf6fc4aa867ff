"""Thirty deployments written after the rules, in shapes of sources not looked at before; each says what it expects."""

from __future__ import annotations

from pathlib import Path

import pytest

from isochunk.core.errors import ConfigError
from tests.deployment.reading import found

FILES = sorted((Path(__file__).parent / "data" / "outside").iterdir())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_is_called_what_it_is(path: Path) -> None:
    text = path.read_text()
    expected = text.partition("# expect: ")[2].partition("\n")[0].strip()
    try:
        rules = {finding.rule for finding in found(text, path.name, path.parent) if finding.level != "note"}
    except ConfigError:
        rules = {"unreadable"}
    assert (rules or {"right"}) == {expected}
