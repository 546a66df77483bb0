"""In the HTTP process: cache groups, as SGLang's own name spaces of the radix cache.

With tenant isolation, the balancer names each request's cache group. SGLang separates prefixes
by `extra_key` (to which it adds the adapter) and by `cache_salt`. The group goes into the salt:
its length, its name, and then what the client sent.

    group "team", no salt        4:team
    group "team", salt "x"       4:teamx
    group "te", salt "amx"       2:teamx

So no two groups share a name space, whatever a client puts into any field. SGLang makes some
requests out of earlier ones, so a salt that already begins with the group stays as it is.
"""

from typing import Any

from sgl_ext.engine.arguments import in_effect
from sgl_ext.engine.core.request_context import RequestContext
from sgl_ext.reading.client import GROUP_HEADER


def group_of(context: RequestContext | None, raw_request: Any) -> str | None:
    """The cache group of a request, by its context, or else by its headers; None: no group."""
    if context is not None:
        return context.group
    return None if raw_request is None else raw_request.headers.get(GROUP_HEADER)


def isolate(request: Any, group: str | None) -> None:
    """Puts a request of SGLang's into the name space of its group.

    Raises ValueError, which is answered 400, if that is impossible.
    """
    if group is None:
        return
    if hasattr(request, "cache_salt"):
        request.cache_salt = salted(group, request.cache_salt)
    elif not in_effect().disable_radix_cache:
        raise ValueError(
            "This engine's cache cannot keep embeddings of tenants apart. Start it with "
            "--disable-radix-cache."
        )


def salted(group: str, salt: Any) -> Any:
    """The salt of a group with a client's own in it: one, or one for each prompt of a batch."""
    if isinstance(salt, list):
        return [salted(group, one) for one in salt]
    if salt is not None and not isinstance(salt, str):
        raise ValueError("cache_salt should be a list or a string.")
    front = f"{len(group)}:{group}"
    return salt if salt is not None and salt.startswith(front) else front + (salt or "")


def is_whole_group(salt: str) -> bool:
    """Whether a salt is that of a group, without a client's own."""
    length, colon, group = salt.partition(":")
    return colon == ":" and length == str(len(group))
