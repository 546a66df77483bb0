"""The source that is a fleet of engines on Ray: `ray:HOST:PORT`, `ray:auto`, `ray:auto/FLEET`.

The actor of each engine writes an `Entry` into Ray's GCS every few seconds, and removes it when the
engine drains or ends. Its key is the actor's name, so an actor that Ray has started again replaces
what it wrote before. An actor that died with its node removes nothing: an entry that was not
renewed for some time, though the GCS answered, does not count.

`Gcs` is a table of small values in a Ray cluster, in the process that knows the cluster's state.
Reading and writing takes a TCP connection to the GCS and nothing else: no Ray process on this
machine, and no `ray.init`, which makes a process part of the cluster and takes seconds. Ray has no
public name for such a client.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from functools import lru_cache
from typing import Self, TypeVar

import msgspec

# Before Ray is imported: nothing is reported to anybody, and no warning is about GPUs of others.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

from ray._private.services import canonicalize_bootstrap_address, parse_address
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # a compiled module
from ray.exceptions import RayError

from sgl_ext.membership.member import Member, MembershipError

logging.getLogger("ray").setLevel(logging.ERROR)

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
    actor was made; see `plan.Order`. ready: the engine answered the actor's last probe.
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


_NAMESPACE = b"sgl_ext"
_TIMEOUT_S = 5.0
_Result = TypeVar("_Result")


class Gcs:
    """The table of one cluster. Every method raises MembershipError if the GCS does not answer."""

    def __init__(self, address: str, client: GcsClient) -> None:
        self.address = address
        self._client = client

    @classmethod
    async def connect(cls, address: str) -> Self:
        """address: HOST:PORT, as `gcs_address` returns it."""
        try:  # in a thread: it waits for the GCS for up to 40 s
            return cls(address, await asyncio.to_thread(GcsClient, address=address))
        except RayError as error:
            raise _unanswered(address, error) from None

    async def put(self, key: str, value: bytes) -> None:
        await self._within(
            self._client.async_internal_kv_put(key.encode(), value, True, _NAMESPACE, _TIMEOUT_S)
        )

    async def get(self, key: str) -> bytes | None:
        return await self._within(
            self._client.async_internal_kv_get(key.encode(), _NAMESPACE, _TIMEOUT_S)
        )

    async def delete(self, key: str) -> None:
        await self._within(
            self._client.async_internal_kv_del(key.encode(), False, _NAMESPACE, _TIMEOUT_S)
        )

    async def below(self, prefix: str) -> dict[str, bytes]:
        """The values of all keys with this prefix, which their names here lack."""
        start = prefix.encode()
        keys = await self._within(
            self._client.async_internal_kv_keys(start, _NAMESPACE, _TIMEOUT_S)
        )
        if not keys:
            return {}
        found: dict[bytes, bytes] = await self._within(
            self._client.async_internal_kv_multi_get(keys, _NAMESPACE, _TIMEOUT_S)
        )
        return {key.removeprefix(start).decode(): value for key, value in sorted(found.items())}

    async def _within(self, answer: Awaitable[_Result]) -> _Result:
        try:
            return await asyncio.wait_for(answer, _TIMEOUT_S + 1)
        except (RayError, OSError, TimeoutError) as error:
            raise _unanswered(self.address, error) from None


def _unanswered(address: str, error: Exception) -> MembershipError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return MembershipError(f"Ray's GCS at {address}: {reason}")


def gcs_address(text: str) -> str:
    """HOST:PORT of the cluster that `auto` or an address names, if something listens there.

    auto: the variable RAY_ADDRESS, or the cluster that was started on this machine.
    Raises MembershipError.
    """
    try:
        address: str | None = canonicalize_bootstrap_address(text)
    except (ConnectionError, ValueError, OSError):
        address = None
    host, port = parse_address(address or "") or ("", "")
    if address is None or not port.isdigit():
        raise MembershipError(
            "no Ray cluster runs here" if text == "auto" else "must be auto or HOST:PORT"
        )
    try:
        with socket.create_connection((host, int(port)), timeout=_TIMEOUT_S):
            return address
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MembershipError(f"no Ray cluster listens at {address}: {reason}") from None
