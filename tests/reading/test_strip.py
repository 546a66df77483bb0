"""The strip removes leading headers, moves volatile lines if it shall, and changes nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.protocols.registry import PATHS, of_path
from sgl_ext.reading.places import common_prefix
from sgl_ext.reading.segments import read_chain
from sgl_ext.reading.strip import KEPT, KINDS, HeaderStrip, find_lines, move_lines, strip_request

# The strip removes leading headers from a text, and nothing else.

HEADER = "x-anthropic-billing-header: cc_version=2.1.197.3af; cc_entrypoint=sdk-cli;"
S = "You are a coding agent."
STRIP = HeaderStrip()


@pytest.mark.parametrize(
    "text",
    [
        f"{HEADER}\n{S}",
        f"{HEADER}\r\n{S}",
        f"{HEADER}\r{S}",
        f" \t\n {HEADER}\n{S}",
        f"{HEADER}\n{HEADER}\n{S}",
        f"{HEADER}\n\n{HEADER}\n{S}",
        f"{HEADER}{HEADER}{S}",
        f"{HEADER}{S}",
        f"{HEADER} \t\n{S}",
        f"{HEADER.upper()}\n{S}",
        f"{HEADER.title()}\n{S}",
        f"{HEADER[:-1]}\n{S}",
        f"x-anthropic-billing-header:a=1\n{S}",
        f"x-anthropic-billing-header: cch=; cc_is_subagent=true;\n{S}",
    ],
)
def test_a_leading_header_is_removed(text: str) -> None:
    assert STRIP.strip(text).text == S


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"{HEADER} {S}", f" {S}"),
        (f"{HEADER} PATH=a b; c\n{S}", f" PATH=a b; c\n{S}"),
        (f"{HEADER}PATH=/bin is set;\n{S}", f"PATH=/bin is set;\n{S}"),
        (f"{HEADER}PATH=/bin\n{S}", f"PATH=/bin\n{S}"),
        (f"{HEADER}\n\n{S}", f"\n{S}"),
        (f"{HEADER}\n  {S}", f"  {S}"),
    ],
)
def test_text_after_a_header_stays_byte_for_byte(text: str, left: str) -> None:
    assert STRIP.strip(text).text == left


@pytest.mark.parametrize(
    "text",
    [
        S,
        "",
        f"{S}\n{HEADER}",
        f"a {HEADER}",
        "x-anthropic-billing-header: is what Claude Code sends\n",
        "x-anthropic-billing-header:",
        "x-anthropic-billing-header cc_version=1;",
        "y-anthropic-billing-header: cc_version=1;",
    ],
)
def test_a_text_without_a_leading_header_is_the_same_object(text: str) -> None:
    assert STRIP.strip(text).text is text


def test_fields_are_returned_and_those_of_later_headers_count() -> None:
    text = "X-Anthropic-Billing-Header: a=1; b=2;\nx-anthropic-billing-header: b=3\n"
    assert STRIP.strip(text) == ("", 2, {"a": "1", "b": "3"})


def test_added_names_are_stripped_and_no_names_strip_nothing() -> None:
    assert HeaderStrip(["x-trace"]).strip("X-Trace: id=1;\nS").text == "S"
    assert HeaderStrip(["x-trace"]).strip(f"{HEADER}\nS").text == f"{HEADER}\nS"
    assert HeaderStrip([]).strip(f"{HEADER}\nS").text == f"{HEADER}\nS"


@pytest.mark.parametrize("name", ["", "two words", "x:", "-x", "x\n"])
def test_a_bad_header_name_is_rejected_by_name(name: str) -> None:
    with pytest.raises(ValueError, match="not a header name"):
        HeaderStrip([name])


def test_mentions_are_counted_anywhere() -> None:
    assert STRIP.mentions(f"{HEADER} .. {HEADER.upper()}".encode()) == 2


keys = st.text("abcdefghijklmnopqrstuvwxyzABC019_.-", min_size=1, max_size=12)
values = st.text(
    st.characters(exclude_categories=("Cs", "Zs", "Zl", "Zp", "Cc"), exclude_characters=";"),
    max_size=12,
)
fields = st.builds("{}={};".format, keys, values)
blanks = st.text(" \t", max_size=2)


@st.composite
def headers(draw: st.DrawFn) -> str:
    """A header as a client may write it, with its line's end or without."""
    name = draw(st.sampled_from(["x-anthropic-billing-header", "X-Anthropic-Billing-Header"]))
    parts = draw(st.lists(st.tuples(blanks, fields), min_size=1, max_size=5))
    end = draw(st.sampled_from(["\n", "\r\n", " \n"]))
    return draw(st.text(" \n\t", max_size=3)) + f"{name}:" + "".join(map("".join, parts)) + end


@given(st.lists(headers(), min_size=1, max_size=3), st.text())
def test_any_headers_before_any_text_leave_that_text(found: list[str], text: str) -> None:
    assert STRIP.strip("".join(found) + text).text == STRIP.strip(text).text


@given(st.text() | st.builds("{}{}".format, headers(), st.text()))
def test_the_strip_is_idempotent_and_leaves_a_suffix(text: str) -> None:
    once = STRIP.strip(text)
    assert STRIP.strip(once.text).text == once.text
    assert text.endswith(once.text)
    if not once.headers:
        assert once.text is text


def test_a_text_with_very_many_fields_or_headers_stays() -> None:
    fields, line = "x-anthropic-billing-header: " + "a=b; " * 255, f"{HEADER}\n"
    for many in (fields + "a=b; a=b;", line * 65):
        assert STRIP.strip(many + S).text == many + S
    for most in (fields, line * 64):
        assert STRIP.strip(most + S).text.strip() == S


# The strip changes the system texts of every protocol, and nothing else.


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


USER = {"role": "user", "content": "hello"}
ECHO = {"role": "user", "content": f"{HEADER}\nwhat is this line?"}
RESULT = {
    "role": "user",
    "content": [{"type": "tool_result", "tool_use_id": "t", "content": HEADER}],
}


def anthropic(system: Any, *messages: Any) -> dict[str, Any]:
    return {"system": system, "messages": [*messages, USER]}


def openai(*content: Any, role: str = "system") -> dict[str, Any]:
    return {"messages": [*({"role": role, "content": c} for c in content), USER]}


CASES = [
    ("/v1/messages", anthropic([text(HEADER), text(S)]), anthropic([text(S)])),
    ("/v1/messages", anthropic([text(HEADER + "\n"), text(S)]), anthropic([text(S)])),
    ("/v1/messages", anthropic(f"{HEADER}\n{S}"), anthropic(S)),
    ("/v1/messages", anthropic([text(S), text(f"{HEADER}\nx")]), anthropic([text(S), text("x")])),
    ("/v1/messages", anthropic(HEADER), {"messages": [USER]}),
    ("/v1/messages", anthropic([text(HEADER)]), {"messages": [USER]}),
    ("/v1/messages/count_tokens", anthropic([text(HEADER), text(S)]), anthropic([text(S)])),
    (
        "/v1/messages",
        anthropic(S, {"role": "system", "content": f"{HEADER}\nmind the gap"}),
        anthropic(S, {"role": "system", "content": "mind the gap"}),
    ),
    ("/v1/messages", anthropic(S, {"role": "system", "content": [text(HEADER)]}), anthropic(S)),
    ("/v1/chat/completions", openai(f"{HEADER}\n{S}"), openai(S)),
    ("/v1/chat/completions", openai([text(HEADER), text(S)]), openai([text(S)])),
    ("/v1/chat/completions", openai(f"{HEADER}{S}", role="developer"), openai(S, role="developer")),
    ("/v1/chat/completions", openai(HEADER), openai()),
    ("/v1/responses", {"instructions": f"{HEADER}\n{S}"}, {"instructions": S}),
    ("/v1/responses", {"instructions": HEADER, "input": "hi"}, {"input": "hi"}),
    (
        "/v1/responses",
        {"input": [{"role": "developer", "content": [text(HEADER), text(S)]}, USER]},
        {"input": [{"role": "developer", "content": [text(S)]}, USER]},
    ),
    ("/v1/completions", {"prompt": f"{HEADER}\n{S}"}, {"prompt": S}),
    ("/v1/completions", {"prompt": [f"{HEADER}\n{S}", S]}, {"prompt": [S, S]}),
    ("/generate", {"text": f"{HEADER}\n{S}"}, {"text": S}),
    ("/generate", {"text": [HEADER, S]}, {"text": ["", S]}),
    ("/api/chat", openai(f"{HEADER}\n{S}"), openai(S)),
    ("/api/generate", {"system": HEADER, "prompt": S}, {"prompt": S}),
    ("/vertex_generate", {"instances": [{"text": HEADER + S}]}, {"instances": [{"text": S}]}),
]

UNTOUCHED = [
    ("/v1/messages", {"system": S, "messages": [ECHO, RESULT]}),
    ("/v1/messages", anthropic([text(f"{S}\n{HEADER}\n")])),
    ("/v1/messages", {"system": text(HEADER), "messages": [USER]}),
    ("/v1/chat/completions", {"messages": [ECHO, {"role": "tool", "content": HEADER}]}),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": HEADER}]}),
    ("/v1/responses", {"input": HEADER}),
    ("/v1/responses", {"input": [ECHO]}),
    ("/v1/completions", {"prompt": [1, 2, 3]}),
    ("/generate", {"input_ids": [[1], [2]]}),
    ("/v1/embeddings", {"input": HEADER}),
    ("/unknown", {"system": HEADER}),
]


@pytest.mark.parametrize(("path", "body", "wanted"), CASES)
def test_system_texts_are_stripped_and_the_body_is_not_changed_in_place(
    path: str, body: Any, wanted: Any
) -> None:
    before = copy.deepcopy(body)
    stripped = strip_request(of_path(path), body, STRIP)
    assert stripped.body == wanted
    assert stripped.headers == 1
    assert stripped.fields["cc_entrypoint"] == "sdk-cli"
    assert body == before


@pytest.mark.parametrize(("path", "body"), UNTOUCHED)
def test_header_like_lines_elsewhere_stay(path: str, body: Any) -> None:
    stripped = strip_request(of_path(path), body, STRIP)
    assert stripped.body is body
    assert stripped.headers == 0


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(HEADER)
json_values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "text", "type", "system", "messages", "input"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)
bodies = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("system", "messages", "instructions", "input", "prompt", "text", "instances"), json_values
    ),
)
paths = st.sampled_from(sorted({path for path, *_ in CASES}))


@given(paths, bodies | json_values)
def test_the_strip_never_raises_and_is_idempotent(path: str, body: Any) -> None:
    once = strip_request(of_path(path), body, STRIP)
    twice = strip_request(of_path(path), once.body, STRIP)
    assert twice.body is once.body
    assert twice.headers == 0
    if not once.headers:
        assert once.body is body


# Volatile lines of system texts stand in front of the conversation after the move, each once, and

GIT_STATUS = """gitStatus: This is the git status at the start of the conversation. Note that this \
status is a snapshot in time, and will not update during the conversation.

Current branch: main

Main branch (you will usually use this for PRs): main

Git user: me

Status:
M  a.py
?? b.txt

Recent commits:
7a6dc2f first commit
0b1c2d3 second
"""
# As clients write them.
VOLATILE = [
    ("git_status", GIT_STATUS),
    (
        "git_status",
        GIT_STATUS.replace("M  a.py\n?? b.txt", "(clean)").replace("Git user: me\n\n", ""),
    ),
    (
        "memory_path",
        "You have a persistent file-based memory at `/root/.claude/projects/-p/memory/`. This "
        "directory already exists — write to it directly with the Write tool.\n",
    ),
    ("date", "Today's date is 2026-11-22.\n"),
    ("date", "  Today's date: Sun Nov 22 2026\n"),
    ("date", "The current date is 2026-11-22 10:00:00.\n"),
    ("working_directory", " - Primary working directory: /home/me/p\n"),
    ("working_directory", "Working directory: /home/me/p\n"),
    ("working_directory", "  Workspace root folder: /\n"),
    ("task_list", "# Tasks\n\n- [x] read\n- [ ] write\n"),
]
# Lines that resemble them.
STABLE = [
    "You are an agent.\n",
    "\n",
    "Ask for the working directory: it matters.\n",
    "Today's date matters.\n",
    "The current date is unknown.\n",
    "[ ] is an open task\n",
    "Run git status first.\n",
    "You have a persistent file-based memory.\n",
    "<env>\n",
    "Current branch: is a heading\n",
]
Text = list[tuple[str, str]]

texts = st.lists(
    st.one_of(
        st.sampled_from(VOLATILE),
        st.sampled_from(STABLE).map(lambda line: ("", line)),
        st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"])).map(
            lambda line: ("", f"s {line}\n")
        ),
    ),
    min_size=1,
    max_size=8,
)


def written(text: Text) -> str:
    return "".join(line for _, line in text)


def split(text: Text) -> tuple[str, list[tuple[str, str]]]:
    """What stays of a text, and what moves."""
    return written([each for each in text if not each[0]]), [each for each in text if each[0]]


def with_texts(texts: list[str], content: Any) -> dict[str, Any]:
    return {
        "system": [{"type": "text", "text": text} for text in texts],
        "tools": [{"name": "Read"}],
        "messages": [
            {"role": "user", "content": content},
            {"role": "system", "content": GIT_STATUS},
        ],
    }


def chat(texts: list[str], content: Any) -> dict[str, Any]:
    system = [{"role": "system", "content": text} for text in texts]
    return {"messages": [*system, {"role": "user", "content": content}], "model": "m"}


def responses(texts: list[str], content: Any) -> dict[str, Any]:
    first, *others = texts
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": text}]}
        for text in others
    ]
    return {"instructions": first, "input": [*items, {"role": "user", "content": content}]}


FORMS: dict[str, Callable[[list[str], Any], dict[str, Any]]] = {
    "/v1/messages": with_texts,
    "/v1/messages/count_tokens": with_texts,
    "/v1/chat/completions": chat,
    "/invocations": chat,
    "/api/chat": chat,
    "/v1/responses": responses,
}


@given(
    st.sampled_from([*FORMS]),
    st.lists(texts, min_size=1, max_size=3),
    st.sampled_from(
        ["hello", "", [{"type": "text", "text": "hi"}], [{"type": "image", "source": 1}]]
    ),
)
def test_nothing_but_the_lines_moves(path: str, parts: list[Text], content: Any) -> None:
    form, protocol = FORMS[path], of_path(path)
    body = form([written(text) for text in parts], content)
    before = copy.deepcopy(body)
    moved = move_lines(protocol, body)
    assert body == before
    lines = [line for text in parts for line in split(text)[1]]
    if not lines:
        assert moved.body is body
        return
    reminder = f"<system-reminder>\n{''.join(line for _, line in lines)[:-1]}\n</system-reminder>"
    if isinstance(content, str):
        first: Any = f"{reminder}\n{content}"
    else:
        kind = "input_text" if path == "/v1/responses" else "text"
        first = [{"type": kind, "text": reminder}, *content]
    rests = [split(text)[0] for text in parts]
    if path == "/v1/responses" and not rests[0]:
        expected = responses(["", *(rest for rest in rests[1:] if rest)], first)
        del expected["instructions"]
    elif path == "/v1/responses":
        expected = responses([rests[0], *(rest for rest in rests[1:] if rest)], first)
    else:
        expected = form([rest for rest in rests if rest], first)
        if expected.get("system") == []:
            del expected["system"]
    assert moved.body == expected
    assert sum(moved.kinds.values()) == len(lines)
    assert move_lines(protocol, moved.body).body is moved.body


@pytest.mark.parametrize(("kind", "lines"), VOLATILE)
def test_each_line_of_a_client_is_found_whole(kind: str, lines: str) -> None:
    for text in (lines, f"before\n{lines}after\n", f"before\n{lines[:-1]}"):
        (found,) = find_lines(text)
        assert found.kind == kind
        assert text[found.start : found.end].strip("\n") == lines.strip("\n")


@pytest.mark.parametrize("line", STABLE)
def test_a_line_that_resembles_one_stays(line: str) -> None:
    assert [*find_lines(line)] == []


def test_every_kind_has_an_example() -> None:
    assert {kind for kind, _ in VOLATILE} == set(KINDS)


def test_two_sessions_with_another_git_status_share_tools_and_instructions() -> None:
    protocol = of_path("/v1/messages")

    def head(status: str, strip: HeaderStrip) -> tuple[int, int]:
        texts = ["You are an agent.", f"{status}\n" + "Rules of the house.\n" * 300]
        body = {**with_texts(texts, "hello"), "tools": [{"name": "Read"}]}
        chain = read_chain(protocol, strip_request(protocol, body, strip).body)
        plain = read_chain(protocol, strip_request(protocol, anthropic_of(texts), strip).body)
        return common_prefix(chain.hashes, plain.hashes), chain.head_segments

    def anthropic_of(texts: list[str]) -> dict[str, Any]:
        return with_texts([texts[0], texts[1].replace("a.py", "other.py")], "hello")

    shared, whole = head(GIT_STATUS, HeaderStrip())
    assert shared < whole / 2
    shared, whole = head(GIT_STATUS, HeaderStrip(moves_lines=True))
    assert shared == whole


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "system", "content": GIT_STATUS}],
        [{"role": "assistant", "content": "hi"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}],
    ],
)
def test_lines_without_a_place_stay_and_are_counted(messages: list[Any]) -> None:
    body = {"system": GIT_STATUS, "messages": messages}
    moved = move_lines(of_path("/v1/messages"), body)
    assert moved.body is body
    assert moved.kinds[KEPT] >= 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"instructions": GIT_STATUS, "input": "x", "previous_response_id": "r"}),
        ("/v1/completions", {"prompt": GIT_STATUS}),
        ("/generate", {"text": GIT_STATUS}),
        ("/v1/messages", {"system": GIT_STATUS}),
        ("/v1/messages", {"system": "S", "messages": [{"role": "user", "content": GIT_STATUS}]}),
        ("/v1/messages", {"system": GIT_STATUS, "messages": 3}),
    ],
)
def test_what_has_no_conversation_behind_a_system_text_is_the_same_object(
    path: str, body: dict[str, Any]
) -> None:
    assert move_lines(of_path(path), body).body is body


def test_the_strip_moves_only_if_it_is_told_to() -> None:
    header = "x-anthropic-billing-header: cc_version=1;\n"
    for path in FORMS:
        body = FORMS[path]([header + GIT_STATUS + "S"], "hello")
        plain = strip_request(of_path(path), body, HeaderStrip())
        both = strip_request(of_path(path), body, HeaderStrip(moves_lines=True))
        assert plain.moved == {}
        assert (both.headers, both.fields, both.moved) == (
            1,
            {"cc_version": "1"},
            {"git_status": 1},
        )
        assert both.body == move_lines(of_path(path), plain.body).body


FIELDS = st.sampled_from(["system", "messages", "input", "instructions", "role", "content", "text"])


@given(
    st.sampled_from(PATHS),
    st.recursive(
        st.sampled_from([None, 1, "user", "system", GIT_STATUS]),
        lambda inner: st.lists(inner) | st.dictionaries(FIELDS, inner),
    ),
)
def test_no_body_breaks_it(path: str, body: Any) -> None:
    moved = move_lines(of_path(path), body)
    assert move_lines(of_path(path), moved.body).body is moved.body
