"""Orders from a balancer to an engine, and from its HTTP process to its schedulers."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.wire.orders import (
    Applied,
    Order,
    Orders,
    Version,
    encode_orders,
    read_applied,
    read_orders,
    read_version,
)

texts = st.text(max_size=9)
values = st.dictionaries(
    texts, st.none() | st.booleans() | st.integers(0, 2**40) | st.floats(0, 1e6) | texts, max_size=3
)
orders = st.builds(Orders, st.lists(texts, max_size=3).map(tuple), values)


@given(st.integers(0, 2**62), values)
def test_a_version_of_settings_arrives(number: int, changed: dict[str, Any]) -> None:
    version = Version(number, changed)
    assert read_version(msgspec.json.encode(version)) == version


@given(st.booleans(), texts)
def test_what_an_engine_took_arrives(applied: bool, why: str) -> None:
    said = Applied(applied, why)
    assert read_applied(msgspec.json.encode(said)) == said


@pytest.mark.parametrize("wrong", [b"", b"[]", b'{"number":"1"}', b'{"number":1', b'{"values":3}'])
def test_a_malformed_version_is_an_error(wrong: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        read_version(wrong)
    assert read_version(b'{"number":3,"later":1}') == Version(3)


@pytest.mark.parametrize("wrong", [b"", b"{}", b'{"applied":1}', b'{"applied":true'])
def test_another_answer_is_an_error(wrong: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        read_applied(wrong)


@given(orders, orders)
def test_orders_arrive_and_add_up(first: Orders, later: Orders) -> None:
    assert read_orders(encode_orders(first)) == first
    both = first.and_then(later)
    assert both.unpin == (*first.unpin, *later.unpin)
    assert both.settings == {**first.settings, **later.settings}


def test_the_bytes_of_orders() -> None:
    assert encode_orders(Orders(("a",))) == b'{"unpin":["a"]}'
    assert encode_orders(Orders(settings={"x": 1})) == b'{"settings":{"x":1}}'
    assert read_orders(orjson.dumps({"later": 1})) == Orders()


@given(st.builds(Order, st.floats(0, 1e9), st.lists(texts).map(tuple), values, st.floats(0, 1)))
def test_an_order_reaches_the_other_ranks(order: Order) -> None:
    assert pickle.loads(pickle.dumps(order)) == order
