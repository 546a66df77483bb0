"""Orders: what a balancer changes in an engine, and what that has its schedulers do.

balancer --POST /sgl_ext/settings--> HTTP process --ZMQ--> first scheduler --> all ranks
         Version          <-- Applied             Orders                   Order
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import orjson

from scheduler.load_cost import PRIOR

SETTINGS_PATH = "/sgl_ext/settings"
"""Where an engine takes what was changed, as a `Version`. It answers `Applied`."""


class Version(msgspec.Struct, frozen=True):
    """All that was changed since the start. Of two, the one with the higher number is in effect."""

    number: int = 0
    values: dict[str, Any] = {}


class Applied(msgspec.Struct, frozen=True):
    """Whether a whole engine takes a version, and why not."""

    applied: bool
    why: str = ""


def read_version(body: bytes) -> Version:
    """Raises msgspec.MsgspecError if it is malformed. The values are checked by their settings."""
    return msgspec.json.decode(body, type=Version)


def read_applied(answer: bytes) -> Applied:
    """Raises msgspec.MsgspecError if it is malformed."""
    return msgspec.json.decode(answer, type=Applied)


class Orders(NamedTuple):
    """The prefixes to unpin, and the settings that change, by their names. store: whether what the
    engine holds goes to the tier that engines share, because the engine ends."""

    unpin: tuple[str, ...] = ()
    settings: Mapping[str, Any] = {}
    store: bool = False

    def and_then(self, later: "Orders") -> "Orders":
        """These orders and later ones."""
        settings = {**self.settings, **later.settings}
        return Orders(self.unpin + later.unpin, settings, self.store or later.store)


def encode_orders(orders: Orders) -> bytes:
    """What an HTTP process sends its first scheduler; what is empty is left out."""
    fields: dict[str, Any] = {}
    if orders.unpin:
        fields["unpin"] = orders.unpin
    if orders.settings:
        fields["settings"] = orders.settings
    if orders.store:
        fields["store"] = True
    return orjson.dumps(fields)


def read_orders(message: bytes) -> Orders:
    """Raises ValueError if it is no JSON."""
    order = orjson.loads(message)
    unpin = tuple(order.get("unpin", ()))
    return Orders(unpin, order.get("settings", {}), order.get("store", False))


@dataclass(frozen=True, slots=True)
class Order:
    """An order that all ranks carry out in the same iteration: time goes on to `now_s`, the pins of
    the prefixes in `unpin` are given up, `settings` are in effect, the prefixes that end at the
    nodes `store` go to the tier that engines share, a token that the host loads costs `load_share`
    of a computed one, and that one takes `token_s`. SGLang pickles it."""

    now_s: float
    unpin: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    store: tuple[int, ...] | None = None
    load_share: float = PRIOR
    token_s: float = 0.0
