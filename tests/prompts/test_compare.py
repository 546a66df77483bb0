"""The first byte that differs between prompts, and the kind of the difference."""

from __future__ import annotations

import copy
import random
import string
from datetime import datetime
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sgl_ext.doctor.report import MEANINGS
from sgl_ext.prompts.blocks import read_blocks
from sgl_ext.prompts.compare import Difference, compare
from sgl_ext.protocols.registry import of_path
from tests.prompts.examples import MESSAGES, SYSTEM, TOOLS, messages, system, turns


def difference(old: Any, new: Any) -> Difference:
    found = compare(read_blocks(of_path(MESSAGES), old), read_blocks(of_path(MESSAGES), new))
    assert found is not None
    return found


def agrees(old: Any, new: Any) -> bool:
    return compare(read_blocks(of_path(MESSAGES), old), read_blocks(of_path(MESSAGES), new)) is None


contents = st.lists(st.text("ab", max_size=6), min_size=1, max_size=3)
bodies = st.builds(
    lambda texts, said: {
        "system": system(*texts),
        "messages": [{"role": role, "content": system(*content)} for role, content in said],
    },
    contents,
    st.lists(st.tuples(st.sampled_from(["user", "assistant"]), contents), max_size=4),
)


@given(bodies, bodies)
def test_the_reported_place_is_the_first_that_differs(
    old: dict[str, Any], new: dict[str, Any]
) -> None:
    left, right = read_blocks(of_path(MESSAGES), old), read_blocks(of_path(MESSAGES), new)
    found = compare(left, right)
    whole = [b"".join(block.frame + block.text for block in blocks) for blocks in (left, right)]
    if found is None:
        assert whole[0].startswith(whole[1]) or whole[1].startswith(whole[0])
        return
    number = [block.label for block in right].index(found.block)
    assert left[:number] == right[:number]
    begins = right[number].end - len(right[number].text)
    assert found.at_bytes == begins + found.byte
    if left[number].frame == right[number].frame:
        assert left[number].text[: found.byte] == right[number].text[: found.byte]
        assert left[number].text[: found.byte + 1] != right[number].text[: found.byte + 1]
        assert found.bytes <= max(len(left[number].text), len(right[number].text)) - found.byte
    else:
        assert found.byte == 0
    assert 0 <= found.lost_bytes <= found.rest_bytes
    assert found.kind in MEANINGS


@given(st.integers(0, 4), st.integers(0, 4))
def test_a_growing_conversation_does_not_diverge(few: int, more: int) -> None:
    assert agrees(messages(few), messages(more))


FORMATS = [
    "%Y-%m-%d %H:%M:%S",
    "%Y-%m-%dT%H:%M:%SZ",
    "%Y-%m-%d",
    "%d/%m/%Y",
    "%H:%M:%S",
    "%I:%M %p",
    "%B %d, %Y",
    "%d %b %Y",
    "%A, %B %d, %Y",
    "%a %b %d %H:%M:%S %Y",
]
moments = st.datetimes(datetime(2020, 1, 1), datetime(2030, 1, 1))


@given(moments, moments, st.sampled_from(FORMATS), st.integers(0, 3))
def test_a_planted_clock_is_found(one: datetime, other: datetime, form: str, place: int) -> None:
    left, right = (f"Now it is {moment.strftime(form)}." for moment in (one, other))
    assume(left != right)
    found = difference(*(planted(text, place) for text in (left, right)))
    assert found.kind == "clock"
    assert found.block == PLACES[place]


ids = st.one_of(
    st.uuids().map(str),
    st.uuids().map(lambda uuid: uuid.hex[:16]).filter(lambda text: any(c.isdigit() for c in text)),
    st.integers(10**15, 10**17).map(str),
    st.text(string.ascii_letters + string.digits, min_size=20, max_size=24).map(
        lambda text: f"req_7{text}"
    ),
)


@given(st.data(), st.integers(0, 3))
def test_a_planted_id_is_found(data: st.DataObject, place: int) -> None:
    left, right = data.draw(st.tuples(ids, ids).filter(lambda pair: pair[0] != pair[1]))
    found = difference(*(planted(f"Your session is {text} here.", place) for text in (left, right)))
    assert found.kind == "id"
    assert found.block == PLACES[place]


PLACES = ("tools[2]", "system[0]", "system[1]", "messages[0].content")


def planted(text: str, place: int) -> dict[str, Any]:
    """A body with a text at one of PLACES, in the midst of others."""
    if place == 0:
        tools = copy.deepcopy(TOOLS)
        tools[2]["description"] = f"Finds files. {text} {RULES}"
        return messages(2, tools=tools)
    if place == 3:
        return messages(messages=turns(2, first=f"Find the bug. {text} Please."))
    return messages(2, system=system("a" * 20, f"{RULES}{text}\n{SYSTEM}")[2 - place :])


RULES = "Keep to the rules. "


@given(st.randoms(use_true_random=False))
def test_shuffled_tools_are_found(order: random.Random) -> None:
    tools = order.sample(TOOLS, len(TOOLS))
    assume(tools != TOOLS)
    found = difference(messages(1), messages(1, tools=tools))
    first = next(n for n in range(6) if tools[n] != TOOLS[n])
    assert (found.kind, found.block, found.part) == ("tool_order", f"tools[{first}]", "tools")


@pytest.mark.parametrize(
    ("tools", "block"),
    [
        (TOOLS[:3] + TOOLS[4:], "tools[3]"),
        (TOOLS[:5], "tools[5]"),
        ([*TOOLS, {"name": "Zap"}], "tools[6]"),
        ([{"name": "Bash", "description": "another"}, *TOOLS[1:]], "tools[0]"),
        ([], "tools[0]"),
    ],
)
def test_other_tools_are_found(tools: Any, block: str) -> None:
    found = difference(messages(1), messages(1, tools=tools))
    assert (found.kind, found.block) == ("tools_changed", block)


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("x-billing-header: v=1; id=a;\n", "x-billing-header: v=1; id=b;\n", "header"),
        ("X-Trace-Id: span=12; run=3;", "X-Trace-Id: span=13; run=3;", "header"),
        # The strip would not take these: there is no field in them.
        ("well-known: a thing\n", "well-known: b thing\n", "unknown"),
        ("Folder: /home/anna\n", "Folder: /home/bert\n", "unknown"),
    ],
)
def test_a_header_that_could_be_stripped_is_a_kind_of_its_own(
    old: str, new: str, kind: str
) -> None:
    left, right = (messages(1, system=system(text, SYSTEM)) for text in (old, new))
    assert difference(left, right).kind == kind


def test_lost_bytes_are_those_that_recur_after_the_difference() -> None:
    left, right = (messages(3, system=system(f"It is 12:00:0{n}.", SYSTEM)) for n in range(2))
    found = difference(left, right)
    texts = [block.text for block in read_blocks(of_path(MESSAGES), right)]
    assert found.lost_bytes == sum(map(len, texts[7:])) + len(".")
    assert found.bytes == 1
    assert found.is_same_conversation


def test_an_equal_first_call_does_not_make_conversations_equal() -> None:
    one, other = (messages(messages=turns(2, first, first)) for first in ("Do this", "Do that"))
    assert not difference(one, other).is_same_conversation


def test_an_earlier_message_that_changed_is_rewritten_and_one_that_is_gone_truncated() -> None:
    rewritten = messages(4)
    rewritten["messages"][1]["content"][0]["text"] = "I looked at something else there. " * 4
    found = difference(messages(3), rewritten)
    assert (found.kind, found.block, found.part) == (
        "rewritten",
        "messages[1].content[0]",
        "messages",
    )
    shortened = messages(4)
    shortened["messages"][2]["content"][0]["content"] = "[cleared]"
    assert difference(messages(3), shortened).kind == "truncated"
    without = messages(4)
    del without["messages"][1:3]
    assert difference(messages(3), without).kind == "truncated"


def test_another_agent_is_recognized() -> None:
    other = messages(0, system=system("You name conversations. " * 30), tools=[])
    assert not difference(messages(), other).is_same_agent
    moved = messages(0, system=system("You are an agent.", SYSTEM + "\nFolder: /home/anna"))
    here = messages(0, system=system("You are an agent.", SYSTEM + "\nFolder: /home/bert"))
    assert difference(moved, here).is_same_agent
