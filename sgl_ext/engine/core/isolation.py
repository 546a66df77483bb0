"""In the HTTP process: whose cached prefixes a request may read, as SGLang's own name space.

The balancer names a request's cache group where tenants are kept apart. SGLang parts its tree
by `extra_key` (to which it adds the adapter) and `cache_salt`, a pair. The group is written
into the second, its length in front, and behind it what the client sent:

    group "team", no salt        4:team
    group "team", salt "x"       4:teamx
    group "te", salt "amx"       2:teamx

So no two groups have one name space, whatever a client puts into any field. SGLang makes some
requests of earlier ones, so a salt of the group already stays as it is.
"""

from __future__ import annotations

from typing import Any

from sgl_ext.requests.session import GROUP_HEADER


def group_of(context: Any, raw_request: Any) -> str | None:
    """The group of a request, by its body's context, or else by its headers; None: not told."""
    if context is not None:
        found: str | None = context.group
        return found
    return None if raw_request is None else raw_request.headers.get(GROUP_HEADER)


def isolate(manager: Any, request: Any, group: str | None) -> None:
    """Puts a request of SGLang's into the name space of its group.

    Raises ValueError, which is answered 400, if it cannot be.
    """
    if group is None:
        return
    if hasattr(request, "cache_salt"):
        request.cache_salt = salted(group, request.cache_salt)
    elif manager is None or not manager.server_args.disable_radix_cache:
        raise ValueError(
            "This engine's cache cannot keep embeddings of tenants apart. Start it with "
            "--disable-radix-cache."
        )


def salted(group: str, own: Any) -> Any:
    """The salt of a group, and the client's own in it: one, or one for each prompt of a batch."""
    if isinstance(own, list):
        return [salted(group, one) for one in own]
    if own is not None and not isinstance(own, str):
        raise ValueError("cache_salt should be a list or a string.")
    front = f"{len(group)}:{group}"
    return own if own is not None and own.startswith(front) else front + (own or "")


def is_whole_group(salt: str) -> bool:
    """Whether a salt is of a group, and has nothing of a client's own in it."""
    length, colon, group = salt.partition(":")
    return colon == ":" and length == str(len(group))
