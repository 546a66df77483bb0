"""Items of `/v1/responses` that a request names by their id instead of sending them.

    {"type": "item_reference", "id": "fc_1"}

The AI SDK does so with every item of earlier answers. Each item of a stored answer is a document of
its own under its id, so that a reference is found without the response that it was a part of.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson

from sgl_ext.balancer.store.documents import Document
from sgl_ext.protocols.errors import BalancerError, bad_field

_KIND = "item_reference"
MAX_REFERENCES = 2_000
"""Of one request: each is a lookup in the store."""
MAX_ITEMS = 256
"""Of one answer; later ones cannot be referred to."""
_Json = dict[str, Any]


def ids_in(items: list[Any]) -> tuple[str, ...]:
    """The ids that input items refer to. Raises BalancerError 400, also for an id that comes twice:
    a small body could repeat a large item."""
    ids: dict[str, None] = {}
    for at in _references(items):
        id = items[at].get("id")
        if not isinstance(id, str):
            raise bad_field(f"input[{at}].id", "must be the id of an item")
        if id in ids:
            raise bad_field(f"input[{at}].id", f"refers to {id!r} again")
        ids[id] = None
    if len(ids) > MAX_REFERENCES:
        raise bad_field("input", f"refers to more than {MAX_REFERENCES} items")
    return tuple(ids)


def resolved(items: list[Any], found: Mapping[str, bytes]) -> list[Any]:
    """The items with what they refer to in place of the references.

    found: the JSON of items by their ids. Raises BalancerError 404 for an id that is not there.
    """
    own = [*items]
    for at in _references(items):
        own[at] = _item(at, items[at], found)
    return own


def _references(items: list[Any]) -> list[int]:
    """Where references are. In one expression, as it looks at each item of each request."""
    return [
        at for at, item in enumerate(items) if isinstance(item, dict) and item.get("type") == _KIND
    ]


def _item(at: int, reference: _Json, found: Mapping[str, bytes]) -> Any:
    id = reference["id"]
    if id in found:
        return orjson.loads(found[id])
    # The first sentence is OpenAI's.
    message = (
        f"Item with id '{id}' not found. Items of answers are kept unless `store` is false, and "
        f"until they expire: send the item itself at input[{at}]."
    )
    raise BalancerError(HTTPStatus.NOT_FOUND, message, param=f"input[{at}].id")


def documents_of(output: list[Any]) -> list[Document]:
    """The items of an answer as documents."""
    return [
        Document(item["id"], orjson.dumps(item), b"")
        for item in output[:MAX_ITEMS]
        if isinstance(item, dict) and isinstance(item.get("id"), str)
    ]
