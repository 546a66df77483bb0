"""Messages between balancer processes: those that share a port, and those that share a store.

The processes of a group send them over UDP with the group's secret in front; balancers on several
nodes send them through their store, with their node in front (`balancer.cluster.peers`).
"""

from typing import NamedTuple

import msgspec


class Load(NamedTuple):
    """What a balancer process has at a worker: requests, how many of them decode, and the tokens
    still to prefill."""

    in_flight: int = 0
    decoding: int = 0
    pending_tokens: int = 0


class AdminChanges(msgspec.Struct, frozen=True):
    """What was changed through the admin API, the last source.

    changed_s: when, by the wall clock: of two balancers' changes the later ones count.
    added: URLs of workers. removed: the lasting names of workers that shall get no requests.
    """

    changed_s: float = 0.0
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


class Placed(msgspec.Struct, tag="_Placed"):
    """Where a request was placed; the hashes are in hexadecimal digits."""

    worker: str
    session: str | None
    segments: list[str]
    prompt_tokens: int
    uncached_tokens: int
    tenant: str = ""
    priority: int = 0
    agent: str | None = None


class State(msgspec.Struct, tag="_State"):
    """The load that a process puts on each worker, by the worker's id, where there is any.

    refused: the requests that it refuses because they ended two engines, by their fingerprints, and
        for how many seconds.
    is_trying: whether it sends a request again that may end an engine.
    """

    loads: dict[str, Load]
    admin: AdminChanges
    refused: dict[str, float] = {}
    is_trying: bool = False


class Left(msgspec.Struct, tag="_Left", frozen=True):
    """The client of a request has left, and may send it again: to the process with this number if
    it can.

    key: as of `relay.resends`, in hexadecimal digits.
    """

    key: str
    process: int


Message = Placed | State | Left
_DECODER: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def encode(message: Message) -> bytes:
    """A message's bytes."""
    return msgspec.json.encode(message)


def read_message(data: bytes) -> Message:
    """Raises ValueError if it is malformed, or no such message. Unknown fields are ignored."""
    return _DECODER.decode(data)
