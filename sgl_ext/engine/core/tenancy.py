"""In the HTTP process: the names that a tenant's requests may use in an engine that others share.

SGLang has one name space of requests. It rejects a name that is in use, and aborts every request
whose name begins with that of a request whose client left. So the names that a tenant chooses get
the tenant in front:

    tenant "team", rid "1"     ~4:team:1
    tenant "te", rid "am:1"    ~2:te:am:1

No such name begins with one of another tenant or with one that SGLang made, nor the other way
round. A client without a tenant cannot choose a name that begins with the mark.
"""

from typing import Any

from sgl_ext.engine.core.request_context import RequestContext
from sgl_ext.settings.schema import ANY_ADAPTER, Tenant

MARK = "~"
_NAMES = ("rid", "request_id")


def name_request(request: Any, context: RequestContext) -> None:
    """Puts the tenant in front of the names that a client chose. Raises ValueError, which is
    answered 400, for a name that no client may choose."""
    if is_named_by_client(context):
        request.rid = _named(request.rid, context.owner)


def is_named_by_client(context: RequestContext) -> bool:
    """Whether the client chose the name of its request."""
    body = context.body
    return isinstance(body, dict) and any(body.get(name) is not None for name in _NAMES)


def check_adapters(request: Any, tenant: Tenant) -> None:
    """Raises ValueError, which is answered 400, for an adapter that the tenant may not use."""
    named = getattr(request, "lora_path", None)
    if not named or tenant.adapters == ANY_ADAPTER:
        return
    allowed = tenant.adapters.split()
    for adapter in [named] if isinstance(named, str) else named:
        if adapter is not None and adapter not in allowed:
            raise ValueError(f"model: this tenant may not use the adapter {adapter!r}")


def _named(name: Any, owner: str) -> Any:
    if isinstance(name, list):
        return [_named(one, owner) for one in name]
    if not isinstance(name, str):  # SGLang rejects it, or makes one
        return name
    if owner:
        front = f"{MARK}{len(owner)}:{owner}:"
        return name if name.startswith(front) else front + name
    if name.startswith(MARK):
        raise ValueError(f"rid: must not begin with {MARK!r}")
    return name
