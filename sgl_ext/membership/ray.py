"""The source that is a fleet of engines on Ray: `ray:HOST:PORT`, `ray:auto`, `ray:auto/FLEET`.

The actor of each engine writes an `Entry` into Ray's GCS every few seconds, and removes it when the
engine drains or ends. Its key is the actor's name, so an actor that Ray has started again replaces
what it wrote before. An actor that died with its node removes nothing: an entry that was not
renewed for some time, though the GCS answered, does not count.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from functools import lru_cache

import msgspec

from sgl_ext.membership.gcs import Gcs, gcs_address
from sgl_ext.membership.member import Member

RENEWED_S = 4.0
"""How often an actor writes its entry."""
GONE_S = 20.0
"""After so long without a renewal an entry does not count. The balancer's probes find a dead engine
long before."""
DEFAULT_FLEET = "sgl-ext"
_POLL_S = 0.5
log = logging.getLogger(__name__)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's actor says of itself.

    member: the engine that runs; None between two of them. generation, settings: with which the
    actor was made; see `sgl_ext.fleet`. ready: the engine answered the actor's last probe.
    renewal: another one in each write.
    failure: why an engine ended that never became ready, with the end of its log.
    """

    member: Member | None
    node: str
    generation: int
    settings: str
    ready: bool = False
    renewal: int = 0
    failure: str = ""

    @property
    def state(self) -> str:
        """What it does, in words."""
        if self.member is None:
            return f"starts again on {self.node}"
        drains = self.member.state == "draining"
        word = "draining" if drains else "ready" if self.ready else "starting"
        return f"{word} at {self.member.url}"


def engines_key(fleet: str, name: str = "") -> str:
    """The key of an actor's entry, or what the keys of all entries begin with."""
    return f"{fleet}/engines/{name}"


def decoded(entries: Mapping[str, bytes]) -> dict[str, Entry]:
    """The entries that can be read, by the actors' names; others are logged."""
    found = {}
    for name, raw in entries.items():
        try:
            found[name] = msgspec.json.decode(raw, type=Entry)
        except msgspec.MsgspecError as error:
            _warn(name, str(error))
    return found


@lru_cache(256)
def _warn(name: str, error: str) -> None:
    """Logs it once: an entry is read twice a second."""
    log.warning("the entry of %s in Ray's GCS is malformed: %s", name, error)


class Renewals:
    """Which entries are still renewed."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[bytes, float]] = {}

    def alive(self, entries: Mapping[str, bytes], now_s: float) -> dict[str, bytes]:
        """The entries without those that have been the same for `GONE_S`."""
        seen = {
            name: self._seen[name]
            if name in self._seen and self._seen[name][0] == raw
            else (raw, now_s)
            for name, raw in entries.items()
        }
        self._seen = seen
        return {name: raw for name, (raw, since_s) in seen.items() if now_s - since_s < GONE_S}


class RayFleet:
    """Follows the engines of a fleet. Raises MembershipError if no cluster listens there."""

    def __init__(self, name: str, where: str) -> None:
        """where: ADDRESS or ADDRESS/FLEET."""
        self.name = name
        address, _, fleet = where.partition("/")
        self._fleet = fleet or DEFAULT_FLEET
        self._address = gcs_address(address)

    async def lists(self) -> AsyncIterator[tuple[Member, ...]]:
        # An entry that was not renewed while the GCS did not answer is not gone: each call counts
        # its renewals from the beginning.
        gcs, renewals = await Gcs.connect(self._address), Renewals()
        last: tuple[Member, ...] | None = None
        while True:
            raw = await gcs.below(engines_key(self._fleet))
            entries = decoded(renewals.alive(raw, time.monotonic()))
            members = tuple(each.member for each in entries.values() if each.member is not None)
            if members != last:
                last = members
                yield members
            await asyncio.sleep(_POLL_S)
