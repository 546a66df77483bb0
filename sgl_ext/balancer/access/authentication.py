"""Authentication: the tenant of each request, and whether its key permits the request.

There are three kinds of keys:

    operator     `--api-key`; permits everything
    admin        a key of a tenant with `admin = true`; permits everything, too
    tenant       permits the tenant's own requests: the paths below /v1 and the engines' other
                 generation paths

With a key file, the key decides the tenant of a request, and the client's own `x-tenant-id` is
dropped. Only operators and admins may name a tenant there, as a proxy that authenticates its
callers itself does. Without a key file the balancer trusts `x-tenant-id`. Without any key it
refuses what a web page may have sent (`refuse_page`).

A browser on the node, or one that can reach it, sends requests for whatever page it shows. No key
tells them from the operator's, but the browser's own headers do:

    Origin            the page's address, with everything but plain GET requests
    Sec-Fetch-Site    `cross-site` if the page is from elsewhere
    Host              a page whose name its owner has pointed at our address (DNS rebinding) still
                      sends that name; it reads what it requests, so each path that shows data is
                      requested by an address, or by a name of this machine

A page cannot read an answer, as none permits it (CORS), and it cannot send JSON unless it passes
for one of our own, which its Origin then shows.

A key that was revoked on one balancer is revoked on all that share a store. Each balancer has the
operator's key file. The newest one, by the time of its last change, is known to all through the
store: its version and the hashes of its keys. A balancer that reads an older file says so, and
accepts only the keys that both files have. So the store can take keys away and never give one: who
can write there gains nothing.
"""

import hmac
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from http import HTTPStatus
from ipaddress import ip_address
from pathlib import Path
from socket import gethostname
from urllib.parse import urlsplit

import aiohttp

from sgl_ext.balancer.http.request_head import RequestHead
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.store.documents import StoreFailed
from sgl_ext.balancer.store.shared_state import SharedState
from sgl_ext.key_file import ApiKey, KeyFile, KeysError, read_keys
from sgl_ext.protocols import routes
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.settings.schema import SettingsError
from sgl_ext.settings.secrets import EngineSecret, file_version
from sgl_ext.tenants import Tenants
from sgl_ext.wire.headers import (
    GROUP_HEADER,
    OWNER_HEADER,
    SECRET_HEADER,
    TENANT_HEADER,
    TENANT_NAME,
    header_line,
)

log = logging.getLogger(__name__)

_PUBLIC = {"/", *routes.HEALTH}
_TENANT = TENANT_HEADER.encode()
# No client may set these, with or without keys.
_OURS = {GROUP_HEADER.encode(), OWNER_HEADER.encode()}
# What a client reads before it asks, by whatever name it knows the node: only names of models.
_OPEN = ("/v1/models", "/api/tags")
# These and all paths below /sgl_ext/ need an operator's or an admin's key.
_ADMINISTRATIVE = {
    *routes.FANNED_OUT,
    *routes.FANNED_OUT_GET,
    *routes.METRICS,
    "/server_info",
    "/get_server_info",
}


class KeyFileReloader:
    """The API key file. An invalid change leaves the earlier keys in force.

    keys: the last valid content, or what other balancers leave of it. The constructor raises
        KeysError if there is none.
    changed_ns: when the file with this content was last changed.
    clock: seconds since 1970.
    """

    def __init__(
        self, path: Path, metrics: Metrics, clock: Callable[[], float] = time.time
    ) -> None:
        self.path = path
        self.clock = clock
        self._checked_s = clock()
        self._version = file_version(path)
        self.changed_ns = 0 if self._version is None else self._version[0]
        self._content: KeyFile = read_keys(path)
        self._others: frozenset[str] | None = None
        self.keys = self._content
        self._reloads = metrics.file_reloads

    def reload_if_changed(self) -> bool:
        """Whether new content was loaded. Call this periodically."""
        version = file_version(self.path)
        if version == self._version:
            return False
        self._version = version
        try:
            self._content = read_keys(self.path)
        except KeysError as error:
            log.error("keys=%s: %s; the earlier keys stay valid", self.path, error)
            self._reloads.counts["keys", "refused"] += 1
            return False
        log.info("keys=%s: reloaded", self.path)
        self._reloads.counts["keys", "applied"] += 1
        self.changed_ns = 0 if version is None else version[0]
        # Others may have a file that is newer still; that is known within a second.
        self.keys = self._content.only(self._others)
        return True

    def some_expired(self) -> bool:
        """Whether a key has expired since the last call."""
        before, self._checked_s = self._checked_s, self.clock()
        return any(before < key.expires_s <= self._checked_s for key in self.keys.by_hash.values())

    @property
    def hashes(self) -> frozenset[str]:
        """The hashes of all keys of the file."""
        return frozenset(self._content.by_hash)

    def restrict(self, hashes: frozenset[str] | None) -> bool:
        """Makes only keys with these hashes valid, None: all. Whether that changes anything."""
        before, self._others = self.keys.by_hash, hashes
        self.keys = self._content.only(hashes)
        return before != self.keys.by_hash


@dataclass(frozen=True, repr=False)  # which would show the key
class Authentication:
    """Checks requests by their heads.

    key: the operator's.
    key_file: the tenants' keys.
    isolates: whether the engines get each tenant's cache group, so that groups share no prefixes.
    is_behind_gateway: whether a gateway passes requests on, whose clients know it by its own name.
    """

    key: str | None
    key_file: KeyFileReloader | None
    tenants: Tenants
    isolates: bool
    is_behind_gateway: bool = False

    def admit(self, head: RequestHead) -> None:
        """Sets the head's route and tenant. Raises BalancerError 400, 401, 403, 404, 405 or 415."""
        if not _OURS.isdisjoint(head.fields):
            head.set_headers({GROUP_HEADER: None, OWNER_HEADER: None})
        stated = _stated_tenant(head)
        is_guarded = self.key is not None or self.key_file is not None
        if is_guarded and not _is_public(head):
            self._identify(head)
        elif self.isolates:
            self._set_tenant(head, stated)
        # A browser names the page as the origin of its own scripts.
        if not is_guarded and not routes.is_page(head.path):
            needed = _needed_host(head)
            if self.is_behind_gateway and needed is Host.ADDRESS:
                needed = Host.ANY
            refuse_page(head.fields, needed)
        head.is_socket = head.is_socket and head.path in routes.SOCKETS
        if head.is_socket:
            return  # its requests come with their own heads
        head.route = route = routes.to_one(head.method, head.path)
        if route is not None and route.placed and head.content_type != "application/json":
            raise BalancerError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"content-type: must be application/json, not {head.content_type!r}",
            )

    def _identify(self, head: RequestHead) -> None:
        key = _key_of(head.fields)
        is_operator = self.key is not None and hmac.compare_digest(key, self.key.encode())
        if self.key_file is None:
            if not is_operator:
                raise _unauthorized()
            if self.isolates:
                self._set_tenant(head, _stated_tenant(head))
            return
        keys, tenant = self.key_file.keys, ""
        if not is_operator:
            head.key = found = keys.find(key)
            if found is None:
                raise _unauthorized()
            if found.expires_s <= self.key_file.clock():
                raise _expired(found)
            tenant = found.tenant
        if is_operator or keys.allowance(tenant).admin:
            self._set_tenant(head, _stated_tenant(head) or tenant)
        else:
            _require_tenant_path(head)
            self._set_tenant(head, tenant, owner=tenant)

    def _set_tenant(self, head: RequestHead, tenant: str, owner: str | None = None) -> None:
        """Replaces the headers about the tenant that the engine gets."""
        group = self.tenants.of(tenant).group if self.isolates else None
        head.tenant = tenant
        head.set_headers({TENANT_HEADER: tenant or None, GROUP_HEADER: group, OWNER_HEADER: owner})


def _key_of(fields: dict[bytes, bytes]) -> bytes:
    """The key, from the header of OpenAI's clients or of Anthropic's."""
    scheme, _, token = fields.get(b"authorization", b"").partition(b" ")
    bearer = token.strip() if scheme.lower() == b"bearer" else b""
    return bearer or fields.get(b"x-api-key", b"")


def _stated_tenant(head: RequestHead) -> str:
    """The value of `x-tenant-id`, "" if there is none."""
    name = head.fields.get(_TENANT, b"").decode("latin-1")
    if name and TENANT_NAME.fullmatch(name) is None:
        message = f"{TENANT_HEADER}: must be at most 256 characters of printable ASCII"
        raise BalancerError(HTTPStatus.BAD_REQUEST, message)
    return name


def _is_public(head: RequestHead) -> bool:
    """Whether anybody may request it: probes, and the page's files, which hold no data."""
    is_read = head.method in ("GET", "HEAD")
    return is_read and (head.path in _PUBLIC or routes.is_page(head.path))


def _is_administrative(path: str) -> bool:
    return path in _ADMINISTRATIVE or path.startswith("/sgl_ext/")


class Host(Enum):
    """What a request without a key must be addressed to."""

    ANY = "a proxy may pass on the name by which its clients know it"
    ADDRESS = "an address, or a name of this machine: no page has that name"
    LOOPBACK = "a loopback name: only this machine administers"


def _needed_host(head: RequestHead) -> Host:
    path = head.path
    if path in routes.METRICS:  # Prometheus may run on another machine
        return Host.ADDRESS
    if _is_administrative(path):
        return Host.LOOPBACK
    is_read = head.method in ("GET", "HEAD") and not _is_public(head)
    # The page that opens a WebSocket is in its Origin.
    is_open = path.startswith(_OPEN) or (head.is_socket and path in routes.SOCKETS)
    return Host.ADDRESS if is_read and not is_open else Host.ANY


def _require_tenant_path(head: RequestHead) -> None:
    """Raises BalancerError if a tenant may not request the head's path.

    A path that is spelled so that an engine might read it as another one is rejected, too.
    """
    path = head.path
    if _is_administrative(path):
        message = f"{head.method} {path}: needs an operator's key"
        raise BalancerError(HTTPStatus.FORBIDDEN, message)
    is_plain = path.startswith("/v1/") and not any(odd in path for odd in ("%", "//", "/."))
    if not is_plain and not routes.is_known_to_one(path):
        raise BalancerError(HTTPStatus.NOT_FOUND, f"{head.method} {path}: Not Found")


def _expired(key: ApiKey) -> BalancerError:
    at = datetime.fromtimestamp(key.expires_s, UTC)
    return BalancerError(HTTPStatus.UNAUTHORIZED, f"This API key expired at {at:%Y-%m-%dT%H:%MZ}.")


def _unauthorized() -> BalancerError:
    return BalancerError(HTTPStatus.UNAUTHORIZED, "Invalid or missing API key.")


def refuse_page(fields: Mapping[bytes, bytes], needed: Host) -> None:
    """Raises BalancerError 403, naming the header, if a page of another machine sent the request.

    `fields` has lower-case names.
    """
    origin = fields.get(b"origin", b"").decode("latin-1")
    if origin == "null" or (
        origin.lower().startswith(("http:", "https:")) and not _is_loopback(origin)
    ):
        raise _refused("origin", origin)
    if needed is Host.ANY:
        return
    site = fields.get(b"sec-fetch-site", b"").decode("latin-1")
    if site.lower() == "cross-site":
        raise _refused("sec-fetch-site", site)
    host = fields.get(b"host", b"").decode("latin-1")
    is_ours = not host or _is_loopback(f"//{host}")
    if not is_ours and (needed is Host.LOOPBACK or not _is_address(f"//{host}")):
        raise _refused("host", host)


def _is_loopback(url: str) -> bool:
    """Whether a URL names this machine, by a name that no DNS server can point elsewhere."""
    try:
        name = (urlsplit(url).hostname or "").removesuffix(".")
        return name == "localhost" or name.endswith(".localhost") or ip_address(name).is_loopback
    except ValueError:
        return False


def _is_address(url: str) -> bool:
    """Whether a URL has an IP address, or the name that this machine has itself."""
    try:
        name = (urlsplit(url).hostname or "").removesuffix(".")
        return name == gethostname().lower() or bool(ip_address(name))
    except ValueError:
        return False


def _refused(header: str, value: str) -> BalancerError:
    return BalancerError(
        HTTPStatus.FORBIDDEN,
        f"{header}: {value[:80]!r} is not this machine. Without --api-key or --keys a request that "
        "a web page elsewhere may have sent is refused, and administration is local.",
    )


_NAME = "keys"
_HASH_BYTES = 32


class SharedKeys:
    """Compares this balancer's key file with the newest one."""

    def __init__(self, key_file: KeyFileReloader, state: SharedState, metrics: Metrics) -> None:
        self._key_file = key_file
        self._state = state
        self._shared = -1
        self._is_older = False
        self._older = metrics.key_file_older

    async def compare(self) -> bool:
        """Whether other keys are valid now than before. Call it every second."""
        version, hashes = self._key_file.changed_ns, self._key_file.hashes
        try:
            newer = await self._state.newer(_NAME, version)
            if newer is None and version > self._shared:
                await self._state.share(_NAME, version, b"".join(map(bytes.fromhex, hashes)))
                self._shared = version
        except StoreFailed:  # what was revoked stays revoked
            return False
        valid = None if newer is None else _split_hashes(newer[1])
        is_older = valid is not None and valid != hashes
        if is_older and not self._is_older:
            message = "keys=%s: another balancer reads a newer file: only keys in both are valid"
            log.warning(message, self._key_file.path)
            self._older.inc()
        elif self._is_older and not is_older:
            log.info("keys=%s: as new as that of every other balancer", self._key_file.path)
        self._is_older = is_older
        return self._key_file.restrict(valid)


def _split_hashes(data: bytes) -> frozenset[str]:
    ends = range(0, len(data), _HASH_BYTES)
    return frozenset(data[at : at + _HASH_BYTES].hex() for at in ends)


class SentSecret:
    """The current secret. An invalid change of its file leaves the earlier one in force.

    line: the header line for the data path; empty without a secret.
    """

    def __init__(self, source: str | None, metrics: Metrics) -> None:
        """source: the setting `engine-secret`. Raises SettingsError."""
        self._secret = EngineSecret(source)
        self._reloads = metrics.file_reloads

    @property
    def line(self) -> bytes:
        if not self._secret.accepted:
            return b""
        return header_line(SECRET_HEADER, self._secret.sent.encode())

    def put_into(self, session: aiohttp.ClientSession) -> None:
        """Lets a session, which may be for engines only, send the secret from now on. Without one
        it says so, and an engine that has one refuses its probes."""
        session.headers[SECRET_HEADER] = self._secret.sent

    def reload_if_changed(self) -> bool:
        """Whether the secret has changed. Call this periodically."""
        try:
            changed = self._secret.reload_if_changed()
        except SettingsError as error:
            log.error("%s; the earlier secret stays valid", error)
            self._reloads.counts["engine_secret", "refused"] += 1
            return False
        if changed:
            log.info("engine_secret: read again")
            self._reloads.counts["engine_secret", "applied"] += 1
        return changed
