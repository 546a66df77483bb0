"""Volatile lines of system texts stand in front of the conversation after the move, each once, and
everything else is what it was."""

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


def anthropic(texts: list[str], content: Any) -> dict[str, Any]:
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
    "/v1/messages": anthropic,
    "/v1/messages/count_tokens": anthropic,
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
        body = {**anthropic(texts, "hello"), "tools": [{"name": "Read"}]}
        chain = read_chain(protocol, strip_request(protocol, body, strip).body)
        plain = read_chain(protocol, strip_request(protocol, anthropic_of(texts), strip).body)
        return common_prefix(chain.hashes, plain.hashes), chain.head_segments

    def anthropic_of(texts: list[str]) -> dict[str, Any]:
        return anthropic([texts[0], texts[1].replace("a.py", "other.py")], "hello")

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
