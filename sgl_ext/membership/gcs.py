"""A table of small values in a Ray cluster: its GCS, the process that knows the cluster's state.

Reading and writing takes a TCP connection to the GCS and nothing else: no Ray process on this
machine, and no `ray.init`, which makes a process part of the cluster and takes seconds. Ray has no
public name for such a client.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable
from typing import Self, TypeVar

# Before Ray is imported: nothing is reported to anybody, and no warning is about GPUs of others.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

from ray._private.services import canonicalize_bootstrap_address, parse_address
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # a compiled module
from ray.exceptions import RayError

from sgl_ext.membership.member import MembershipError

logging.getLogger("ray").setLevel(logging.ERROR)

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
