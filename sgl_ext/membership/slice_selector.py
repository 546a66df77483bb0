"""Which EndpointSlices a source follows, as the operator writes it after `kubernetes:`.

engines                              the service in the balancer's own namespace
serving/engines:http                 a namespace, and the port's name or number
serving/?selector=app=engine,tier=a  the slices with these labels, of any service
engines?api=v1beta1                  for clusters before 1.21
"""

import re
from typing import Self
from urllib.parse import parse_qsl

import msgspec

from sgl_ext.membership.endpoint_slices import ANY_PORT
from sgl_ext.membership.member import MembershipError

FORM = "[NAMESPACE/]SERVICE[:PORT][?selector=LABELS&api=v1beta1]"
VERSIONS = ("v1", "v1beta1")
_SERVICE_LABEL = "kubernetes.io/service-name"
_PARTS = re.compile(r"(?:(?P<namespace>[^/:?]*)/)?(?P<service>[^/:?]*)(?::(?P<port>[^/:?]*))?\Z")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")


class SliceSelector(msgspec.Struct, frozen=True, kw_only=True):
    """namespace: empty: the balancer's own."""

    namespace: str
    labels: str
    port: str = ANY_PORT
    api: str = "v1"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises MembershipError."""
        path, _, query = text.partition("?")
        parts = _PARTS.match(path)
        if parts is None:
            raise MembershipError(f"must be kubernetes:{FORM}")
        options = dict(parse_qsl(query, keep_blank_values=True))
        selector, api = options.pop("selector", ""), options.pop("api", "v1")
        if options:
            raise MembershipError(f"{next(iter(options))}: is no option; selector and api are")
        if api not in VERSIONS:
            raise MembershipError(f"api={api!r}: must be {' or '.join(VERSIONS)}")
        service = parts["service"]
        if bool(service) == bool(selector):
            raise MembershipError("must name a service, or selector=LABELS in its place")
        for what in ("namespace", "service", "port"):
            if parts[what] and not _NAME.match(parts[what]):
                raise MembershipError(f"{what} {parts[what]!r}: is no name that Kubernetes allows")
        return cls(
            namespace=parts["namespace"] or "",
            labels=selector or f"{_SERVICE_LABEL}={service}",
            port=parts["port"] or ANY_PORT,
            api=api,
        )
