"""Slices of prompts that are prefilled ahead: requests with names that no client can forge."""

from typing import Any
from uuid import uuid4

import xxhash

from scheduler.prefill import Rejection
from sgl_ext.engine.core.folder import secret

_MARK = "~sgl_ext-ahead-"
_DIGEST = 16


def slice_name(
    *,
    is_guess: bool,
    is_forced: bool,
    conversation: str = "",
    purpose: str = "",
    request_id: str = "",
) -> str:
    """A new name for a slice.

    conversation: whose next request will read it, as `digest` names it; "" if it is not counted.
    is_guess: the extension guessed the prompt; no client asked for it.
    is_forced: it runs even if all of it is cached, so that its hints are recorded.
    purpose, request_id: why it runs, and for which request; log lines show them.
    """
    kind = f"{'g' if is_guess else 'a'}{'f' if is_forced else '-'}"
    return f"{secret(_MARK)}{kind}{conversation:-<{_DIGEST}}{uuid4().hex}~{purpose}~{request_id}"


def digest(conversation: str) -> str:
    """A short name of a conversation."""
    return xxhash.xxh3_64_hexdigest(conversation.encode("utf-8", "surrogatepass"))


def conversation_of(slice_: Any) -> str:
    """The conversation whose next request will read a slice; "" if it is not counted."""
    begin = len(secret(_MARK)) + 2
    return str(slice_.rid[begin : begin + _DIGEST]).strip("-")


def is_slice_name(name: Any) -> bool:
    """Whether a request of this name is a slice."""
    # The cheap check comes first: most requests are no slices, and this is called often.
    return isinstance(name, str) and name.startswith(_MARK) and name.startswith(secret(_MARK))


def is_slice(request: Any) -> bool:
    """Whether a request, of whatever kind, is a slice."""
    return is_slice_name(getattr(request, "rid", None))


def is_guess(request: Any) -> bool:
    """Whether a request is a slice of a guessed prompt."""
    return is_slice(request) and request.rid[len(secret(_MARK))] == "g"


def read_rejection(message: str) -> tuple[Rejection, int] | None:
    """The reason in a rejection's message, and how many tokens of the slice are cached."""
    why, _, cached = message.partition(" ")
    return (Rejection(why), int(cached)) if why in set(Rejection) and cached.isdigit() else None


def is_forced(request: Any) -> bool:
    """Whether a request is a slice that runs even if all of it is cached."""
    return is_slice(request) and request.rid[len(secret(_MARK)) + 1] == "f"
