"""Cache marks of every protocol are read, and malformed ones rejected as Anthropic rejects them."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.cache_marks import NO_MARKS, Mark, Marks, TtlLimits, read_marks

MESSAGES = "/v1/messages"
CHAT = "/v1/chat/completions"
OPENAI = [CHAT, "/v1/completions", "/v1/responses", "/generate"]
EVERY = [MESSAGES, *OPENAI]
LIMITS = TtlLimits(min_s=10, max_s=7200)
MARK = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def read(body: Any, path: str = MESSAGES, limits: TtlLimits = LIMITS) -> Marks:
    before = copy.deepcopy(body)
    marks = read_marks(of_path(path), body, limits)
    assert repr(body) == repr(before)
    return marks


def one(control: Any) -> Marks:
    """The marks of a body with one marked block."""
    return read({"messages": [user(text("Hi", cache_control=control))]})


def test_anthropics_marks_are_in_prompt_order_with_their_places():
    body = {
        "messages": [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm"},
                    {
                        "type": "tool_use",
                        "id": "1",
                        "name": "A",
                        "input": {},
                        "cache_control": MARK,
                    },
                ],
            },
            user({"type": "tool_result", "tool_use_id": "1", "content": "", "cache_control": MARK}),
        ],
        "system": [text("You help."), text("Folder: /a", cache_control=HOUR)],
        "tools": [{"name": "A"}, {"name": "B", "cache_control": HOUR}, {"name": "C"}],
    }
    assert read(body) == Marks(
        blocks=(
            Mark(("tools", 1), 3600.0),
            Mark(("system", 1), 3600.0),
            Mark(("messages", 1, 1), 300.0),
            Mark(("messages", 2, 0), 300.0),
        )
    )


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "source": {"type": "base64", "data": "AA=="}},
        {"type": "document", "source": {"type": "text", "data": "a"}},
        {"type": "search_result", "source": "a", "title": "b", "content": []},
        {"type": "tool_use", "id": "1", "name": "a", "input": {}},
        {"type": "tool_result", "tool_use_id": "1"},
        text(" "),
    ],
)
def test_every_kind_of_block_but_thinking_can_be_marked(block: dict[str, Any]):
    body = {"messages": [user(text("Hi"), block | {"cache_control": MARK})]}
    assert read(body) == Marks((Mark(("messages", 0, 1), 300.0),))


def test_a_mark_inside_a_tool_result_is_at_the_place_of_the_result():
    result = {"type": "tool_result", "content": [text("a", cache_control=HOUR), text("b")]}
    assert read({"messages": [user(text("Hi"), result)]}).blocks == (
        Mark(("messages", 0, 1), 3600.0),
    )
    both = read({"messages": [user(text("Hi"), result | {"cache_control": MARK})]})
    assert both.blocks == (Mark(("messages", 0, 1), 3600.0),)


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"messages": [user(text("a")), {"role": "user", "content": "b"}]}, ("messages", 1)),
        ({"messages": [user(text("a"), text("b"))]}, ("messages", 0, 1)),
        ({"messages": [user(text("a"), text(""))]}, ("messages", 0, 0)),
        (
            {"messages": [user(text("a"), {"type": "thinking", "thinking": "b"})]},
            ("messages", 0, 0),
        ),
        ({"messages": [user(text("a")), {"role": "assistant", "content": ""}]}, ("messages", 0, 0)),
        ({"messages": [], "system": [text("a")]}, ("system", 0)),
        ({"messages": [], "system": "a"}, ("system",)),
        ({"tools": [{"name": "a"}, {"name": "b"}]}, ("tools", 1)),
    ],
)
def test_a_mark_at_the_root_is_on_the_last_block_that_can_have_one(body: Any, place: Any):
    assert read(body | {"cache_control": HOUR}) == Marks((Mark(place, 3600.0),))


def test_a_mark_at_the_root_of_an_empty_prompt_is_ignored():
    assert read({"messages": [], "cache_control": MARK}) is NO_MARKS


@pytest.mark.parametrize(
    ("ttl", "seconds"),
    [
        ("5m", 300),
        ("1h", 3600),
        ("30s", 30),
        ("10m", 600),
        ("2h", 7200),
        ("90", 90),
        (90, 90),
        (90.5, 90.5),
        (None, 300),
        ("3s", 10),
        (1, 10),
        ("3h", 7200),
        ("999999999h", 7200),
    ],
)
def test_a_ttl_is_seconds_or_has_a_unit_and_is_clamped(ttl: Any, seconds: float):
    assert one({"type": "ephemeral", "ttl": ttl}).blocks[0].ttl_s == seconds


@pytest.mark.parametrize(
    "ttl",
    [
        *("-1", "", "forever", "5 m", "5d", "1.5h", "\u0665m", "0", "0s", "1" * 5000),
        *(0, -1, True, False, math.nan, math.inf, -math.inf, 10**400, [], ["5m"], {}),
    ],
)
def test_a_bad_ttl_is_rejected_with_its_field(ttl: Any):
    marks = one({"type": "ephemeral", "ttl": ttl})
    assert marks == Marks(error=marks.error)
    assert marks.error == (
        "messages.0.content.0.cache_control.ttl: must be a number of seconds above 0, alone or "
        "with a unit, such as '5m' or '1h'"
    )


@pytest.mark.parametrize(
    "control", ["ephemeral", 1, True, [], {}, {"type": "persistent"}, {"ttl": "5m"}, {"type": []}]
)
def test_a_malformed_mark_is_rejected_with_its_field(control: Any):
    wanted = "must be an object whose `type` is 'ephemeral'"
    assert one(control).error == f"messages.0.content.0.cache_control: {wanted}"
    inner = {"type": "tool_result", "content": [text("a", cache_control=control)]}
    for body, field in [
        ({"tools": [{"name": "a"}, {"name": "b", "cache_control": control}]}, "tools.1."),
        ({"system": [text("a", cache_control=control)]}, "system.0."),
        ({"messages": [user(text("a"), inner)]}, "messages.0.content.1.content.0."),
        ({"messages": [user(text("a"))], "cache_control": control}, ""),
    ]:
        assert read(body).error == f"{field}cache_control: {wanted}"


def test_null_is_no_mark():
    body = {
        "tools": [{"name": "a", "cache_control": None}],
        "messages": [user(text("", cache_control=None))],
        "cache_control": None,
        "nvext": {"cache_control": None},
        "prompt_cache_retention": None,
    }
    for path in EVERY:
        assert read(body, path) is NO_MARKS


@pytest.mark.parametrize("kind", ["thinking", "redacted_thinking"])
def test_thinking_cannot_be_marked(kind: str):
    thought = {"type": kind, kind: "a", "cache_control": MARK}
    body = {"messages": [user(text("a")), {"role": "assistant", "content": [thought]}]}
    field = f"messages.1.content.0.{kind}.cache_control"
    assert read(body).error == f"{field}: Extra inputs are not permitted"


def test_an_empty_text_cannot_be_marked():
    refusal = "cache_control cannot be set for empty text blocks"
    block = text("", cache_control=MARK)
    assert read({"system": [text("a"), block]}).error == f"system.1: {refusal}"
    assert read({"messages": [user(block)]}).error == f"messages.0.content.0: {refusal}"


def test_five_marks_are_too_many_and_the_root_counts():
    blocks = [text(str(k), cache_control=MARK) for k in range(5)]
    refusal = "A maximum of 4 blocks with cache_control may be provided. Found 5."
    assert read({"messages": [user(*blocks)]}).error == refusal
    assert read({"messages": [user(*blocks[:4])], "cache_control": MARK}).error == refusal
    assert len(read({"messages": [user(*blocks[:4])]}).blocks) == 4


def test_a_longer_ttl_must_not_come_after_a_shorter_one():
    def refusal(field: str, later: str, earlier: str) -> str:
        return (
            f"{field}.ttl: a ttl='{later}' cache_control block must not come after a "
            f"ttl='{earlier}' cache_control block. Note that blocks are processed in the "
            "following order: `tools`, `system`, `messages`."
        )

    short = {"type": "ephemeral", "ttl": "5m"}
    body = {"messages": [user(text("a", cache_control=short), text("b", cache_control=HOUR))]}
    where = "messages.0.content.1.cache_control"
    assert read(body).error == refusal(where, "1h", "5m")
    body = {"messages": [user(text("a", cache_control=HOUR))], "tools": [{"cache_control": MARK}]}
    assert read(body).error == refusal("messages.0.content.0.cache_control", "1h", "5m")
    odd = {"type": "ephemeral", "ttl": 400}
    body = {"system": [text("a", cache_control=odd)], "messages": [user(text("a"))]}
    assert read(body | {"cache_control": HOUR}).error == refusal("cache_control", "1h", "400")


def test_the_rule_on_order_compares_with_each_earlier_mark():
    asked = [{"type": "ephemeral", "ttl": ttl} for ttl in ("1h", "5m", "30m")]
    blocks = [text(control["ttl"], cache_control=control) for control in asked]
    assert "ttl='30m' cache_control block must not" in read({"messages": [user(*blocks)]}).error
    assert not read({"messages": [user(blocks[0], blocks[2], blocks[1])]}).error


def test_the_rule_on_order_does_not_depend_on_the_limits():
    narrow = TtlLimits(min_s=600, max_s=600, default_s=900)
    short = {"type": "ephemeral", "ttl": "5m"}
    body = {"messages": [user(text("a", cache_control=short), text("b", cache_control=MARK))]}
    assert [mark.ttl_s for mark in read(body, limits=narrow).blocks] == [600, 600]
    body = {"messages": [user(text("a", cache_control=short), text("b", cache_control=HOUR))]}
    assert read(body, limits=narrow).error


def test_marks_of_chat_completions():
    body = {
        "tools": [
            {"type": "function", "function": {"name": "a"}, "cache_control": MARK},
            {"type": "function", "function": {"name": "b", "cache_control": HOUR}},
        ],
        "messages": [
            {"role": "system", "content": "You help.", "cache_control": HOUR},
            user(text("a", cache_control=MARK), text("b")),
        ],
    }
    assert read(body, CHAT) == Marks(
        blocks=(
            Mark(("tools", 0), 300.0),
            Mark(("tools", 1), 3600.0),
            Mark(("messages", 0), 3600.0),
            Mark(("messages", 1, 0), 300.0),
        )
    )


def test_malformed_marks_of_chat_completions_are_counted_and_ignored():
    blocks = [text(str(k), cache_control=MARK) for k in range(6)]
    marks = read({"messages": [user(text("", cache_control=MARK), *blocks)]}, CHAT)
    assert [mark.place[2] for mark in marks.blocks] == [1, 2, 3, 4]
    assert (marks.ignored, marks.error) == (3, "")
    bad = {
        "tools": [{"function": {"cache_control": "yes"}}],
        "messages": [{"role": "user", "content": "a", "cache_control": {"type": "x"}}],
        "cache_control": {"type": "ephemeral", "ttl": "forever"},
        "prompt_cache_retention": "always",
    }
    assert read(bad, CHAT) == Marks(ignored=4)
    assert read({"prompt_cache_retention": ["24h"]}, CHAT) == Marks(ignored=1)


def test_a_mark_at_the_root_of_chat_completions_is_on_the_whole_prompt():
    assert read({"messages": [user(text("a"))], "cache_control": HOUR}, CHAT) == Marks(
        whole_ttl_s=3600.0
    )


@pytest.mark.parametrize("path", OPENAI)
def test_retention_is_for_the_whole_prompt(path: str):
    wide = TtlLimits(min_s=1, max_s=1e6)
    for retention, seconds in [("in_memory", 300), ("in-memory", 300), ("24h", 86_400)]:
        marks = read({"prompt_cache_retention": retention}, path, wide)
        assert marks == Marks(whole_ttl_s=seconds)
    assert read({"prompt_cache_retention": "24h"}, path) == Marks(whole_ttl_s=7200.0)


@pytest.mark.parametrize("path", OPENAI[1:])
def test_protocols_without_marks_on_blocks_ignore_cache_control(path: str):
    body = {"input": [user(text("a", cache_control=MARK))], "cache_control": MARK}
    assert read(body, path) is NO_MARKS


def test_anthropics_protocol_ignores_openais_retention():
    assert read({"prompt_cache_retention": "24h"}) is NO_MARKS


@pytest.mark.parametrize("path", EVERY)
def test_our_own_field_is_read_on_every_path(path: str):
    assert read({"nvext": {"cache_control": HOUR}}, path) == Marks(whole_ttl_s=3600.0)
    for control, field in [
        ("1h", "nvext.cache_control: must be an object whose `type` is 'ephemeral' or 'none'"),
        ({"type": "x"}, "nvext.cache_control: must be"),
        ({"type": "ephemeral", "ttl": "soon"}, "nvext.cache_control.ttl: must be"),
    ]:
        marks = read({"nvext": {"cache_control": control}}, path)
        assert marks == Marks(error=marks.error)
        assert marks.error.startswith(field)


def test_the_longest_ttl_for_the_whole_prompt_counts():
    body = {"nvext": {"cache_control": MARK}, "prompt_cache_retention": "24h"}
    assert read(body, CHAT).whole_ttl_s == 7200
    body = {"nvext": {"cache_control": HOUR}, "prompt_cache_retention": "in_memory"}
    assert read(body | {"cache_control": MARK}, CHAT).whole_ttl_s == 3600


@pytest.mark.parametrize("path", EVERY)
def test_a_request_can_ask_not_to_be_kept(path: str):
    body = {
        "messages": [user(text("a", cache_control=MARK))],
        "cache_control": MARK,
        "nvext": {"cache_control": {"type": "none"}},
    }
    limits = TtlLimits(min_s=1, max_s=10, unmarked_s=5)
    assert read(body, path, limits) == Marks(keep=False)


@pytest.mark.parametrize("path", EVERY)
def test_a_request_without_marks_has_the_servers_ttl(path: str):
    body = {"messages": [user(text("a"))], "nvext": {"priority": 1}}
    assert read(body, path) is NO_MARKS
    assert read(body, path, TtlLimits(1, 10, unmarked_s=60)) == Marks(whole_ttl_s=60)


def test_a_marked_request_does_not_have_the_ttl_of_an_unmarked_one():
    body = {"messages": [user(text("a", cache_control=MARK))]}
    limits = TtlLimits(1, 10, unmarked_s=60)
    assert read(body, MESSAGES, limits).whole_ttl_s == 0
    assert read({"nvext": {"cache_control": MARK}}, MESSAGES, limits).whole_ttl_s == 10


def test_other_paths_and_bodies_have_no_marks():
    limits = TtlLimits(1, 10, unmarked_s=60)
    body = {"messages": [user(text("a", cache_control=MARK))], "cache_control": MARK}
    assert read(body, "/v1/models", limits) is NO_MARKS
    for value in (None, [], "x", 1):
        assert read(value, limits=limits) is NO_MARKS


def options(**fields: Any) -> dict[str, Any]:
    return {"prompt_cache_options": fields}


def breakpoint_on(words: str) -> dict[str, Any]:
    return text(words, prompt_cache_breakpoint={"mode": "explicit"})


def prompt(path: str, *parts: Any) -> dict[str, Any]:
    """A body with one user's message of these parts, after another message."""
    field = "messages" if path == CHAT else "input"
    return {field: [{"role": "system", "content": "You help."}, user(*parts)]}


def place(path: str, j: int) -> tuple[str | int, ...]:
    return ("messages", 1, j) if path == CHAT else ("input", 1, "content", j)


BREAKABLE = pytest.mark.parametrize("path", [CHAT, "/v1/responses"])


@BREAKABLE
def test_a_breakpoint_is_a_mark_for_half_an_hour_or_the_options_ttl(path: str):
    body = prompt(path, breakpoint_on("a"), text("b"))
    assert read(body, path) == Marks((Mark(place(path, 0), 1800.0),))
    told = options(mode="explicit", ttl="30m")
    assert read(body | told, path) == Marks((Mark(place(path, 0), 1800.0),))
    implicit = read(body | options(ttl="1h"), path)
    assert implicit == Marks((Mark(place(path, 0), 3600.0),), whole_ttl_s=3600.0)


@BREAKABLE
def test_a_breakpoint_can_state_its_own_ttl(path: str):
    long = text("b", prompt_cache_breakpoint={"mode": "explicit", "ttl": "12h"})
    body = prompt(path, breakpoint_on("a"), long) | options(mode="explicit", ttl="30m")
    found = read(body, path, TtlLimits(min_s=1, max_s=86_400))
    assert found.blocks == (Mark(place(path, 0), 1800.0), Mark(place(path, 1), 43_200.0))
    wrong = text("b", prompt_cache_breakpoint={"mode": "explicit", "ttl": "soon"})
    error = read(prompt(path, text("a"), wrong), path).error
    assert ".1.content.1.prompt_cache_breakpoint.ttl: must be a number of seconds" in error


@BREAKABLE
@pytest.mark.parametrize(("mode", "written"), [("explicit", 4), ("implicit", 3)])
def test_the_last_four_breakpoints_are_written_the_implicit_one_included(
    path: str, mode: str, written: int
):
    parts = [breakpoint_on(str(j)) for j in range(81)]
    marks = read(prompt(path, *parts[:6]) | options(mode=mode), path)
    assert [mark.place[-1] for mark in marks.blocks] == list(range(6 - written, 6))
    assert (marks.ignored, marks.whole_ttl_s > 0) == (0, mode == "implicit")
    assert read(prompt(path, *parts) | options(mode=mode), path).ignored == 1  # 80 count


def test_the_result_of_a_call_can_have_a_breakpoint():
    output = {"type": "function_call_output", "call_id": "c", "output": [breakpoint_on("a")]}
    marks = read({"input": [output]}, "/v1/responses")
    assert marks.blocks == (Mark(("input", 0, "output", 0), 1800.0),)


@pytest.mark.parametrize("path", OPENAI)
def test_options_without_a_breakpoint_keep_all_or_nothing(path: str):
    assert read(options(mode="implicit", ttl="30m"), path) == Marks(whole_ttl_s=1800.0)
    assert read(options(), path) == Marks(whole_ttl_s=1800.0)
    assert read(options(mode="explicit"), path) == Marks(keep=False)
    both = options(mode="explicit") | {"nvext": {"cache_control": HOUR}}
    assert read(both, path) == Marks(whole_ttl_s=3600.0)


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ("24h", ": must be an object"),
        ({"mode": "auto"}, ".mode: must be 'implicit' or 'explicit'"),
        ({"mode": ["explicit"]}, ".mode: must be 'implicit' or 'explicit'"),
        ({"ttl": "forever"}, ".ttl: must be a number of seconds above 0, alone or with a unit"),
        ({"generate": False}, ".generate: is not supported"),
    ],
)
def test_malformed_options_are_rejected_by_name(path: str, fields: Any, error: str):
    marks = read({"prompt_cache_options": fields}, path)
    assert marks == Marks(error=marks.error)
    assert marks.error.startswith(f"prompt_cache_options{error}")


@BREAKABLE
@pytest.mark.parametrize("control", [True, "explicit", {}, {"mode": "implicit"}])
def test_a_malformed_breakpoint_is_rejected_by_name(path: str, control: Any):
    marks = read(prompt(path, text("a"), text("b", prompt_cache_breakpoint=control)), path)
    field = {CHAT: "messages.1.content.1"}.get(path, "input.1.content.1")
    wanted = "must be an object whose `mode` is 'explicit'"
    assert marks.error == f"{field}.prompt_cache_breakpoint: {wanted}"


@pytest.mark.parametrize("path", OPENAI)
def test_options_and_retention_exclude_each_other(path: str):
    marks = read(options(ttl="30m") | {"prompt_cache_retention": "24h"}, path)
    expected = "prompt_cache_retention: must not be given together with prompt_cache_options"
    assert marks == Marks(error=expected)


def test_a_ttl_above_the_limit_is_told_and_the_most_that_a_client_wants_is_not():
    nine = {"type": "ephemeral", "ttl": "9h"}
    assert one(nine).clamped_s == 7200
    assert one(HOUR).clamped_s == 0
    assert read({"nvext": {"cache_control": nine}}).clamped_s == 7200
    assert read(options(ttl="9h"), CHAT).clamped_s == 7200
    assert read({"prompt_cache_retention": "24h"}, CHAT).clamped_s == 0
    hinted = read_marks(of_path(CHAT), {}, LIMITS, lease_s=1e5)
    assert hinted == Marks(whole_ttl_s=7200, clamped_s=7200)


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(
        ["ephemeral", "none", "5m", "text", "thinking", "tool_result", "24h", "explicit"]
    ),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("tools", "system", "messages", "content", "type", "text", "cache_control"),
                    *("ttl", "function", "nvext", "prompt_cache_retention", "input", "output"),
                    *("prompt_cache_options", "prompt_cache_breakpoint", "mode"),
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=30,
)
blocks = st.fixed_dictionaries(
    {},
    optional={
        "type": anything,
        "cache_control": anything,
        "prompt_cache_breakpoint": st.just({"mode": "explicit"}) | anything,
    },
)
shaped = st.fixed_dictionaries(
    {
        field: st.lists(st.fixed_dictionaries({"content": st.lists(blocks | anything)}))
        for field in ("messages", "input")
    },
    optional={
        "prompt_cache_options": st.just({"mode": "implicit"}) | anything,
        "tools": st.lists(blocks | anything, max_size=3) | anything,
        "system": st.lists(blocks | anything, max_size=3) | anything,
        "cache_control": anything,
        "nvext": st.fixed_dictionaries({"cache_control": anything}) | anything,
    },
)


@given(st.sampled_from([*EVERY, "/api/chat", "/x"]), anything | shaped)
def test_reading_never_raises(path: str, body: Any):
    marks = read_marks(of_path(path), body, LIMITS)
    assert len(marks.blocks) <= 8  # four of each vocabulary
    assert all(10 <= mark.ttl_s <= 7200 for mark in marks.blocks)
    assert not marks.error or marks == Marks(error=marks.error)
    json.dumps(marks.error)
