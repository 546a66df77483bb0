"""The strip removes leading headers from a text, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.reading.strip import HeaderStrip

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
