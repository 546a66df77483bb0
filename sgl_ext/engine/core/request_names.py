"""In the HTTP process: the names by which SGLang knows a request, its tenant and its cache group.

SGLang's log lines show the name (`rid`), so it begins with the id by which the client and the
balancer know the request:

    ~req_1~5f0c...             24 digits, unique
    ~req_1~retry-1~5f0c...     another engine has failed before
    (a slice)~prefill~req_1    prefilled ahead (`hints.py`)

SGLang aborts every request whose name begins with that of a request whose client left. No name here
begins with another: an id contains no "~", and digits of one length follow it. Nor can a client
without a tenant choose a name that begins with "~", and a tenant's begins with "~",
a number and ":", which no id contains.

SGLang has one name space of requests. It rejects a name that is in use, and aborts every request
whose name begins with that of a request whose client left. So the names that a tenant chooses get
the tenant in front:

    tenant "team", rid "1"     ~4:team:1
    tenant "te", rid "am:1"    ~2:te:am:1

No such name begins with one of another tenant or with one that SGLang made, nor the other way
round. A client without a tenant cannot choose a name that begins with the mark.

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
from sgl_ext.protocols.request_ids import HEADER, is_valid_id, new_request_id, unique_digits
from sgl_ext.settings.schema import ANY_ADAPTER, Tenant
from sgl_ext.wire.headers import GROUP_HEADER


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


_HEADER = HEADER.encode()
_ON_SCOPE = "sgl_ext_request_id"


def request_id_of(scope: Any) -> str:
    """The id of an ASGI scope's request: that of its header, or one that is made with the first
    call."""
    state = scope.setdefault("state", {})
    request_id: str | None = state.get(_ON_SCOPE)
    if request_id is None:
        stated = [value for name, value in scope["headers"] if name == _HEADER]
        request_id = stated[0].decode("latin-1") if len(stated) == 1 else ""
        if not is_valid_id(request_id):
            request_id = new_request_id()
        state[_ON_SCOPE] = request_id
    return request_id


def new_name(context: RequestContext) -> str:
    """A new name for a generation of this request."""
    purpose = f"{context.purpose}{MARK}" if context.purpose else ""
    return f"{MARK}{context.request_id}{MARK}{purpose}{unique_digits()}"


def name_after_id(request: Any, context: RequestContext) -> None:
    """Names SGLang's request, unless its client named it, or will cancel it by the name that SGLang
    made. `request` is one of several classes."""
    body = context.body
    if is_named_by_client(context) or not context.request_id:
        return
    if isinstance(body, dict) and body.get("background"):
        return
    texts, ids = getattr(request, "text", None), getattr(request, "input_ids", None)
    if texts is None and ids is None:
        return
    if isinstance(texts, list):
        request.rid = [new_name(context) for _ in texts]
    elif isinstance(ids, list) and ids and isinstance(ids[0], list):
        request.rid = [new_name(context) for _ in ids]
    else:
        request.rid = new_name(context)


def keep_id(original: Any, request: Any) -> Any:
    """Around `regenerate_rid`, which names the samples of a request for several: they keep the
    request's id."""
    names = request.rid if isinstance(request.rid, list) else [request.rid]
    made = original(request)
    if not all(isinstance(name, str) and name.startswith(MARK) for name in names):
        return made
    new = [f"{name.rpartition(MARK)[0]}{MARK}{unique_digits()}" for name in names]
    request.rid = new if isinstance(request.rid, list) else new[0]
    return request.rid
