"""Slices of prompts that are prefilled ahead: requests with names that no client can forge."""

from typing import Any
from uuid import uuid4

import xxhash

from scheduler.prefill import Rejection
from sgl_ext.engine.core.folder import secret

_MARK = "~sgl_ext-ahead-"
_DIGEST = 16
_END_DIGITS = 8


def slice_name(
    *,
    is_guess: bool,
    is_forced: bool,
    conversation: str = "",
    prompt: str = "",
    end: int = 0,
    purpose: str = "",
    request_id: str = "",
) -> str:
    """A new name for a slice.

    conversation: whose next request will read it, as `digest` names it; "" if it is not counted.
    prompt: a `digest` that all slices of one prompt share. end: how many of its tokens the slice
        has, however many are sent with it.
    is_guess: the extension guessed the prompt; no client asked for it.
    is_forced: it runs even if all of it is cached, so that its hints are recorded.
    purpose, request_id: why it runs, and for which request; log lines show them.
    """
    kind = f"{'g' if is_guess else 'a'}{'f' if is_forced else '-'}"
    part = f"{prompt:-<{_DIGEST}}{end:0{_END_DIGITS}x}"
    about = f"{uuid4().hex}~{purpose}~{request_id}"
    return f"{secret(_MARK)}{kind}{conversation:-<{_DIGEST}}{part}{about}"


def digest(name: str) -> str:
    """A short name in place of a long one."""
    return xxhash.xxh3_64_hexdigest(name.encode("utf-8", "surrogatepass"))


def conversation_of(slice_: Any) -> str:
    """The conversation whose next request will read a slice; "" if it is not counted."""
    begin = len(secret(_MARK)) + 2
    return str(slice_.rid[begin : begin + _DIGEST]).strip("-")


def part_of(slice_: Any) -> tuple[str, int]:
    """The prompt that a slice is a part of, and how many of its tokens the slice has."""
    begin = len(secret(_MARK)) + 2 + _DIGEST
    end = begin + _DIGEST
    return slice_.rid[begin:end], int(slice_.rid[end : end + _END_DIGITS], 16)


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


def read_rejection(message: str) -> tuple[Rejection, int, int] | None:
    """The reason in a rejection's message, how many tokens of the slice are on the device, and how
    many after them the host would load."""
    match message.split(" "):
        case why, on_device, on_host if why in set(Rejection):
            return Rejection(why), int(on_device), int(on_host)
    return None


def is_forced(request: Any) -> bool:
    """Whether a request is a slice that runs even if all of it is cached."""
    return is_slice(request) and request.rid[len(secret(_MARK)) + 1] == "f"
