"""Refuses what a web page in somebody's browser sends to a balancer without keys.

A browser on the node, or one that can reach it, sends requests for whatever page it shows. No key
tells them from the operator's, but the browser's own headers do:

    Origin            the page's address, with everything but plain GET requests
    Sec-Fetch-Site    `cross-site` if the page is from elsewhere
    Host              a page whose name its owner has pointed at our address (DNS rebinding) still
                      sends that name

A page cannot read an answer, as none permits it (CORS), and it cannot send JSON unless it passes
for one of our own, which its Origin then shows.
"""

from collections.abc import Mapping
from http import HTTPStatus
from ipaddress import ip_address
from urllib.parse import urlsplit

from sgl_ext.protocols.errors import BalancerError


def refuse_page(fields: Mapping[bytes, bytes], *, is_administrative: bool) -> None:
    """Raises BalancerError 403, naming the header, if a page of another machine sent the request.

    Administration must also be addressed to a loopback name. `fields` has lower-case names.
    """
    origin = fields.get(b"origin", b"").decode("latin-1")
    if origin == "null" or (
        origin.lower().startswith(("http:", "https:")) and not _is_loopback(origin)
    ):
        raise _refused("origin", origin)
    if not is_administrative:
        return
    site = fields.get(b"sec-fetch-site", b"").decode("latin-1")
    if site.lower() == "cross-site":
        raise _refused("sec-fetch-site", site)
    host = fields.get(b"host", b"").decode("latin-1")
    if host and not _is_loopback(f"//{host}"):
        raise _refused("host", host)


def _is_loopback(url: str) -> bool:
    """Whether a URL names this machine, by a name that no DNS server can point elsewhere."""
    try:
        name = (urlsplit(url).hostname or "").removesuffix(".")
        return name == "localhost" or name.endswith(".localhost") or ip_address(name).is_loopback
    except ValueError:
        return False


def _refused(header: str, value: str) -> BalancerError:
    return BalancerError(
        HTTPStatus.FORBIDDEN,
        f"{header}: {value[:80]!r} is not this machine. Without --api-key or --keys a request that "
        "a web page elsewhere may have sent is refused, and administration is local.",
    )
