"""In the HTTP process: the id of each HTTP request, and the names of what runs for it.

SGLang's log lines show the name (`rid`), so it begins with the id by which the client and the
balancer know the request:

    ~req_1~5f0c...             24 digits, unique
    ~req_1~retry-1~5f0c...     another engine has failed before
    (a slice)~prefill~req_1    prefilled ahead (`slices.py`)

SGLang aborts every request whose name begins with that of a request whose client left. No name here
begins with another: an id contains no "~", and digits of one length follow it. Nor can a client
without a tenant choose a name that begins with "~" (`tenancy.py`), and a tenant's begins with "~",
a number and ":", which no id contains.
"""

import re
from typing import Any

from sgl_ext.engine.core.request_context import RequestContext
from sgl_ext.engine.core.tenancy import MARK, is_named_by_client
from sgl_ext.protocols.request_ids import HEADER, is_valid_id, new_request_id, unique_digits
from sgl_ext.reading.client import PURPOSE_HEADER

_HEADER = HEADER.encode()
_ON_SCOPE = "sgl_ext_request_id"
_PURPOSE = re.compile(r"[a-z]{1,12}(-[0-9]{1,3})?")


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


def purpose_of(headers: dict[str, str]) -> str:
    """What the balancer sends a request for, "" for the first attempt of a client's own."""
    stated = headers.get(PURPOSE_HEADER, "")
    return stated if _PURPOSE.fullmatch(stated) else ""


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
