from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochunk.proxy.body import SLICE, Body, _Scan, parse_body
from isochunk.proxy.errors import ProxyError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=6)


def parse(data: bytes) -> Body:
    return asyncio.run(parse_body(data))


def edited(body: Body, drop: set[str], extra: dict[str, Any]) -> Any:
    return json.loads(b"".join(body.edited(drop, extra)))


@given(OBJECTS, st.sampled_from([None, 1]), st.booleans())
def test_members_are_found_in_any_object(value: dict[str, Any], indent: int | None, ascii_only: bool) -> None:
    body = parse(json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode())
    assert [member.key for member in body.members] == list(value)
    assert body.values == value
    assert [json.loads(body.data[m.value : m.end]) for m in body.members] == list(value.values())


@given(OBJECTS, st.sets(st.sampled_from(["a", "b", "", "c"])), st.dictionaries(st.sampled_from(["a", "d"]), VALUES))
def test_an_edited_body_is_the_object_without_what_was_dropped_and_with_what_was_added(
    value: dict[str, Any], drop: set[str], extra: dict[str, Any]
) -> None:
    value = {**value, "a": 1, "b": [1, {"a": 2}]}
    assert edited(parse(json.dumps(value).encode()), drop, extra) == {
        **{key: item for key, item in value.items() if key not in drop},
        **extra,
    }


@given(st.text())
def test_text_that_is_no_object_is_refused_exactly_when_a_parser_refuses_it(text: str) -> None:
    try:
        is_object = isinstance(json.loads(text), dict)
    except ValueError:
        is_object = False
    if is_object:
        parse(text.encode())
    else:
        with pytest.raises(ProxyError, match="not a JSON object"):
            parse(text.encode(errors="replace"))


@pytest.mark.parametrize("size", [SLICE - 3, SLICE, SLICE + 3, 3 * SLICE])
@pytest.mark.parametrize("unit", ["x", "\\", '"', "é", "\n"])
def test_long_strings_with_escapes_are_followed_across_slices(size: int, unit: str) -> None:
    value = {"prompt": unit * size, "messages": [{"content": unit * size}], "last": 1}
    body = parse(json.dumps(value).encode())
    assert edited(body, set(), {}) == value
    assert body.values["last"] == 1


@pytest.mark.parametrize(
    "data",
    [b'{"a": "' + b"x" * 200_000, b'{"a": [' + b"1," * 100_000, b'{"a": {"b": "' + b"x" * 200_000],
)
def test_a_long_body_that_breaks_off_is_refused(data: bytes) -> None:
    with pytest.raises(ProxyError, match="has no end"):
        parse(data)


@pytest.mark.parametrize("data", [b'{"a":1\0}', b'{"a":\x001}', b'{"a":"\xed\xa0\x80"}'])
def test_other_encodings_than_utf_8_are_refused(data: bytes) -> None:
    with pytest.raises(ProxyError):
        asyncio.run(parse_body(data))


def test_deep_nesting_is_refused_instead_of_followed() -> None:
    with pytest.raises(ProxyError, match="nested deeper than 200"):
        parse(b'{"a": ' + b"[" * 10_000_000)


def test_the_last_of_equal_keys_counts_and_all_are_replaced() -> None:
    body = parse(b'{"n": 1, "n": 2}')
    assert body.values == {"n": 2}
    assert b"".join(body.edited(set(), {"n": 3})) == b'{"n": 3}'


@pytest.mark.parametrize(
    "value",
    [{"prompt": list(range(10**6))}, {"prompt": 'a "b"\n' * 10**6}, {"messages": [{"content": "x"}] * 50_000}],
)
def test_other_work_gets_its_turn_after_every_slice(value: dict[str, Any]) -> None:
    data = json.dumps(value).encode()
    turns = sum(1 for _ in _Scan(data).run())
    assert turns >= len(data) // (2 * SLICE)
