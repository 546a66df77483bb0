"""The gate that a request passes at its head: who sends it, for which tenant, and whether it may.

Three kinds of callers, told by their key:

    operator     has `--api-key`, and may do everything
    admin        a key of a tenant whose `admin` is true: the same, as that tenant
    tenant       its own requests: what is below /v1, and each engine's other ways to generate

With a file of keys a request is of the tenant that its key says; what the client says of that
is not passed on. Only an operator or admin may name another one, as a proxy does that knows
its own callers. Without, `x-tenant-id` is believed.
"""

from __future__ import annotations

import hmac
from http import HTTPStatus

from sgl_ext.balancer.access.keyring import Keyring
from sgl_ext.balancer.http.request_head import RequestHead
from sgl_ext.protocols import routes
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.requests.session import GROUP_HEADER, OWNER_HEADER, TENANT_HEADER, TENANT_NAME
from sgl_ext.tenants import Tenants

_UNGUARDED = {("GET", "/health"), ("HEAD", "/health"), ("GET", "/"), ("HEAD", "/")}
_TENANT = TENANT_HEADER.encode()
# What only operators may ask for, beside all below /sgl_ext/.
_ADMINISTRATIVE = {
    *routes.FANNED_OUT,
    *routes.FANNED_OUT_GET,
    "/metrics",
    "/server_info",
    "/get_server_info",
}


class Gate:
    """Refuses at the head what the rest of a request cannot make right.

    key: the operator's. keyring: those of tenants. isolates: whether each tenant's requests
    are told apart for the cache, by the cache groups of `tenants`.
    """

    def __init__(
        self,
        key: str | None,
        keyring: Keyring | None = None,
        tenants: Tenants | None = None,
        *,
        isolates: bool = False,
    ) -> None:
        self._key = None if key is None else key.encode()
        self._keyring = keyring
        self._tenants = Tenants() if tenants is None else tenants
        self._isolates = isolates

    def admit(self, head: RequestHead) -> None:
        """Finds the head's route, and says of it whose it is. Raises BalancerError 400, 401,
        403, 404, 405 or 415."""
        is_guarded = self._key is not None or self._keyring is not None
        if is_guarded and (head.method, head.path) not in _UNGUARDED:
            self._identify(head)
        elif self._isolates:
            self._name(head, _named(head))
        head.route = route = routes.to_one(head.method, head.path)
        if route is not None and route.placed and head.content_type != "application/json":
            raise BalancerError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"content-type: must be application/json, not {head.content_type!r}",
            )

    def _identify(self, head: RequestHead) -> None:
        key = _offered(head.fields)
        is_operator = self._key is not None and hmac.compare_digest(key, self._key)
        if self._keyring is None:
            if not is_operator:
                raise _unauthorized()
            if self._isolates:
                self._name(head, _named(head))
            return
        file = self._keyring.file
        tenant = "" if is_operator else file.tenant_of(key)
        if tenant is None:
            raise _unauthorized()
        if is_operator or file.allowance(tenant).admin:
            self._name(head, _named(head) or tenant)
        else:
            _refuse_administration(head)
            self._name(head, tenant, owner=tenant)

    def _name(self, head: RequestHead, tenant: str, owner: str | None = None) -> None:
        """Tells engines whose the request is, in place of what the client said."""
        group = self._tenants.of(tenant).group if self._isolates else None
        head.tenant = tenant
        head.say(
            {
                TENANT_HEADER: tenant or None,
                GROUP_HEADER: group,
                OWNER_HEADER: owner,
            }
        )


def _offered(fields: dict[bytes, bytes]) -> bytes:
    """The key as OpenAI's clients send it or Anthropic's."""
    scheme, _, token = fields.get(b"authorization", b"").partition(b" ")
    bearer = token.strip() if scheme.lower() == b"bearer" else b""
    return bearer or fields.get(b"x-api-key", b"")


def _named(head: RequestHead) -> str:
    """The tenant that the request names, "" if none."""
    name = head.fields.get(_TENANT, b"").decode("latin-1")
    if name and TENANT_NAME.fullmatch(name) is None:
        raise BalancerError(HTTPStatus.BAD_REQUEST, f"{TENANT_HEADER}: must be printable ASCII")
    return name


def _refuse_administration(head: RequestHead) -> None:
    """Raises BalancerError for what is not for tenants: by name, and what might be it disguised."""
    path = head.path
    if path in _ADMINISTRATIVE or path.startswith("/sgl_ext/"):
        message = f"{head.method} {path}: needs the key of an operator"
        raise BalancerError(HTTPStatus.FORBIDDEN, message)
    is_plain = path.startswith("/v1/") and not any(odd in path for odd in ("%", "//", "/."))
    if not is_plain and not routes.is_known_to_one(path):
        raise BalancerError(HTTPStatus.NOT_FOUND, f"{head.method} {path}: Not Found")


def _unauthorized() -> BalancerError:
    return BalancerError(HTTPStatus.UNAUTHORIZED, "Invalid or missing API key.")
