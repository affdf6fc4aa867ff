"""What a step needs of vLLM is looked at before the first one; the tables hold what the source uses."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import isochunk.vllm
from isochunk.core.errors import ConfigError
from isochunk.vllm import compat
from isochunk.vllm.compat import names
from isochunk.vllm.scheduler import NarrowedScheduler
from isochunk.vllm.testing import Engine, engine_config

SOURCE = Path(isochunk.vllm.__file__).parent
FILES = [SOURCE / "scheduler.py", SOURCE / "batch.py", SOURCE / "session.py", *sorted((SOURCE / "compat").glob("*.py"))]
# Read with a default, or of one version only: what is done without them is beside each.
OPTIONAL = {"adaptive_long_prefill_threshold", "deferred_waiting", "drop_stale_output", "skipped_waiting"}


def attributes(owner: str) -> Iterator[tuple[str, str]]:
    """(attribute, file) of each `owner.attribute`, and of `self.attribute` in the mixin for the scheduler."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute):
                continue
            of = node.value
            named = isinstance(of, ast.Name) and of.id == owner
            held = isinstance(of, ast.Attribute) and of.attr == f"_{owner}"
            mixed_in = owner == "scheduler" and path.name == "scheduler.py" and isinstance(of, ast.Name)
            if named or held or (mixed_in and of.id == "self"):  # type: ignore[attr-defined]
                yield node.attr, path.name


def methods() -> set[str]:
    return {name.rpartition(".")[2] for called, _ in names._CALLS for name in called}


def known(table: tuple[str, ...]) -> set[str]:
    return {part.split(".")[0] for name in table for part in name.split("|")}


def test_every_attribute_of_a_request_is_in_the_table() -> None:
    for owner in ("request", "preempted"):
        for attribute, file in attributes(owner):
            if file not in ("routes.py", "session.py"):
                assert attribute in known(names.REQUEST) | OPTIONAL, f"{file}: request.{attribute}"


def test_every_attribute_of_the_scheduler_is_in_the_table() -> None:
    ours = {"isochunk", *vars(NarrowedScheduler)}
    for attribute, file in attributes("scheduler"):
        if attribute.startswith("_") or attribute in ours | OPTIONAL | methods() or file == "ascend.py":
            continue
        assert attribute in known(names.SCHEDULER), f"{file}: scheduler.{attribute}"


def test_the_installed_vllm_has_every_name(make_engine: Callable[..., Engine]) -> None:
    compat.check_names()
    compat.check_scheduler(make_engine(None).scheduler)


@pytest.mark.parametrize("name", names.REQUEST)
def test_a_request_without_a_name_refuses_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    class Poorer:
        def __init__(self, request: Any) -> None:
            self._request = request

        def __getattr__(self, asked: str) -> Any:
            if asked == name:
                raise AttributeError(asked)
            return getattr(self._request, asked)

    make = names.probe_request
    monkeypatch.setattr(names, "probe_request", lambda *arguments: Poorer(make(*arguments)))
    with pytest.raises(ConfigError, match=rf"vLLM .* has no Request\.{name}, .*upgrade isochunk, or disable it"):
        engine_config(tmp_path, {"enabled": True})


CALLS = [(part, called[0], arguments) for called, arguments in names._CALLS for part in called]


@pytest.mark.parametrize(("path", "newest", "arguments"), CALLS)
def test_a_call_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch, path: str, newest: str, arguments: int) -> None:
    if names._resolve(path) is None:
        pytest.skip("the form of other versions")
    module, _, of = path.partition(":")
    owner = of.split(".", maxsplit=1)[0]
    monkeypatch.setattr(f"{module}.{owner}", type(owner, (), {"__init__": None}))
    with pytest.raises(ConfigError, match=newest.rpartition(":")[2].replace("__init__", "")):
        compat.check_names()


@pytest.mark.parametrize(("path", "newest", "arguments"), [call for call in CALLS if call[2]])
def test_a_call_that_takes_other_arguments_is_named(
    monkeypatch: pytest.MonkeyPatch, path: str, newest: str, arguments: int
) -> None:
    if names._resolve(path) is None:
        pytest.skip("the form of other versions")
    monkeypatch.setattr(path.replace(":", "."), lambda self: None)
    with pytest.raises(ConfigError, match=f"{newest.rpartition(':')[2]} with {arguments} arguments"):
        compat.check_names()


@pytest.mark.parametrize("name", [name for name in names.SCHEDULER if "." not in name and name[0] != "_"])
def test_a_scheduler_without_an_attribute_refuses_to_start(make_engine: Callable[..., Engine], name: str) -> None:
    scheduler = make_engine(None).scheduler
    for part in name.split("|"):
        vars(scheduler).pop(part, None)
    with pytest.raises(ConfigError, match=r"Scheduler\."):
        compat.check_scheduler(scheduler)
