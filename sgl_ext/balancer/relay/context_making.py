"""Makes a context of a request that asks for one, and stores it before an engine gets the request.

So the head of the answer can name it, also of a stream. That takes as long as the store needs, at
most its usual limit, and only for requests with the header. Nothing that fails here fails the
request: the answer says why it has no context.
"""

from sgl_ext.balancer.conversations.contexts import COVERS, HEADER, SKIPPED, Registration, read_made
from sgl_ext.balancer.http.request_reader import Request
from sgl_ext.balancer.relay.services import Services
from sgl_ext.protocols.errors import BalancerError

# Of the same size, copying and hashing messages takes several times as long as reading them.
_LARGE_BYTES = 256 << 10
_STORED = ("made", "renewed")


async def make_context(
    services: Services, request: Request, path: str, *, names_stored: bool
) -> bytes:
    """The header lines of the answer to a request of the protocol of this path. Never raises.

    names_stored: whether the request is more than its client sent.
    """
    result, lines = "failed", b""
    with services.context_guard:
        try:
            result = "names_stored"
            if not names_stored:
                result, lines = await _make(services, request, path)
        except BalancerError:  # no room, or the store fails: both are counted there
            result = "unavailable"
    services.metrics.contexts_made.counts[(result,)] += 1
    return lines if result in _STORED else f"{SKIPPED}: {result}\r\n".encode()


async def _make(services: Services, request: Request, path: str) -> tuple[str, bytes]:
    body, strip = request.body, services.strip
    if len(body) > _LARGE_BYTES:
        tenant = request.head.tenant
        made, items = await services.large_bodies.call(tenant, body, read_made, path, strip)
    else:
        made, items = read_made(body, path, strip)
    if items is None:
        return made, b""
    about, covers = made
    tenant = services.router.tenants.asking(request.head.hints).name
    result = await services.conversations.keep_context(tenant, Registration(about, items))
    covered = ", ".join(f"{name}={count}" for name, count in covers.items())
    return result, f"{HEADER}: {about['context_id']}\r\n{COVERS}: {covered}\r\n".encode()
