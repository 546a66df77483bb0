"""The text of a simulated prompt, its blocks, and the answer a simulated engine gives.

A token is BYTES_PER_TOKEN bytes of text, a block BLOCK_TOKENS tokens. The text has
the order and framing of `sgl_ext.reading.segments`, so that a segment's end there
is a position here:

    tools, system texts, messages, then the opening of the assistant's turn

The answer is appended after that opening, and the next turn, which carries it as
an assistant's message, begins with all of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import orjson
import xxhash

from sgl_ext.reading.strip import BILLING_HEADER

BYTES_PER_TOKEN = 4
BLOCK_TOKENS = 64
BLOCK_BYTES = BYTES_PER_TOKEN * BLOCK_TOKENS
ANSWER_OPENING = b"\xffmassistant\xffb"
_WORDS = " ".join(xxhash.xxh3_64_hexdigest(str(n).encode())[: 3 + n % 9] for n in range(20_000))


class Blocks:
    """The chained hashes of a growing text's full blocks."""

    def __init__(self) -> None:
        self.keys = array("Q")
        self.size = 0
        self._rest = b""
        self._last = 0

    @property
    def tokens(self) -> int:
        return self.size // BYTES_PER_TOKEN

    def feed(self, parts: Iterable[bytes]) -> None:
        """Appends text; earlier keys stay."""
        text = b"".join((self._rest, *parts))
        full = len(text) - len(text) % BLOCK_BYTES
        self.size += len(text) - len(self._rest)
        last, digest, append = self._last, xxhash.xxh3_64_intdigest, self.keys.append
        for start in range(0, full, BLOCK_BYTES):
            last = digest(text[start : start + BLOCK_BYTES], last)
            append(last)
        self._last, self._rest = last, text[full:]


def beginning(body: dict[str, Any]) -> Iterator[bytes]:
    """What stands before the messages: the tools.

    A billing header that was not stripped comes first: templates begin with the
    system prompt, so it stands at the first token whatever follows.
    """
    for message in body.get("messages") or ():
        if message.get("role") == "system":
            text = content_of(message)
            if text.startswith(BILLING_HEADER):
                yield text.partition("\n")[0].encode()
            break
    tools = body.get("tools")
    if tools:
        yield b"\xfft" + orjson.dumps(tools, option=orjson.OPT_SORT_KEYS)


def rendered(message: dict[str, Any]) -> bytes:
    """One message's text."""
    text, role = content_of(message).encode(), str(message.get("role"))
    if role == "system":
        return b"\xffs" + text
    return b"".join((b"\xffm", role.encode(), b"\xffb", text))


def content_of(message: dict[str, Any]) -> str:
    """A message's text, whether it is a string or a list of text blocks."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(block.get("text", "") for block in content)
    return content or ""


def prompt_blocks(body: dict[str, Any]) -> Blocks:
    """The blocks of a chat request up to where the answer begins."""
    blocks = Blocks()
    messages = body.get("messages") or ()
    blocks.feed((*beginning(body), *map(rendered, messages), ANSWER_OPENING))
    return blocks


def text_of(tag: str, tokens: int) -> str:
    """A text of exactly so many tokens; texts of different tags differ from their first word."""
    size = tokens * BYTES_PER_TOKEN
    number = xxhash.xxh3_64_intdigest(tag.encode())
    start = number % len(_WORDS)
    text = f"{number:016x} {_WORDS[start : start + size]}"
    while len(text) < size:
        text += _WORDS
    return text[:size]


def answer_to(last_message: str, tokens: int) -> str:
    """What the simulated model says: decided by the end of the last message and the length."""
    return text_of(f"answer {last_message[-512:]}", tokens)
