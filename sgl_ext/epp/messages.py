"""Envoy's messages for external processing: read into plain values, and made of them.

Only this module knows how they look. A picker for another gateway would have another one.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sgl_ext.epp.envoy_api import (
    APPEND,
    BODY_SEND_MODES,
    OVERWRITE,
    ProcessingRequest,
    ProcessingResponse,
)

Header = tuple[bytes, bytes]

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
DESTINATION = "x-gateway-destination-endpoint"
"""The header and the key in which the gateway gets the engine's address, and spare ones."""
_LB = "envoy.lb"
_SERVED = "x-gateway-destination-endpoint-served"
_SUBSET_HINT = "envoy.lb.subset_hint"
_SUBSET = "x-gateway-destination-endpoint-subset"
NONE = BODY_SEND_MODES.index("NONE")
FULL_DUPLEX_STREAMED = BODY_SEND_MODES.index("FULL_DUPLEX_STREAMED")
# What some gateways accept of a body in one message.
_CHUNK_BYTES = 62_000

parse = ProcessingRequest.FromString
serialize = ProcessingResponse.SerializeToString
Request = Any
"""A `ProcessingRequest`: protobuf makes its classes when they are imported."""
Response = Any


# What a gateway says.


def headers_of(header_map: Any) -> list[Header]:
    """Names in lower case, and values. Old gateways put a value into another field."""
    return [(h.key.encode(), h.raw_value or h.value.encode()) for h in header_map.headers]


def modes_of(request: Request) -> tuple[int, int]:
    """How the gateway sends the bodies of requests and answers. A gateway that does not say is one
    of the Gateway API, which asks for FULL_DUPLEX_STREAMED."""
    if not request.HasField("protocol_config"):
        return FULL_DUPLEX_STREAMED, FULL_DUPLEX_STREAMED
    config = request.protocol_config
    return config.request_body_mode, config.response_body_mode


def mode_name(mode: int) -> str:
    """A mode as Envoy's configuration calls it."""
    return BODY_SEND_MODES[mode] if mode < len(BODY_SEND_MODES) else str(mode)


def kind_of(request: Request) -> str:
    """Which part of a request or answer the message has, "" for one that is not known."""
    return str(request.WhichOneof("message") or "")


def subset_of(request: Request) -> frozenset[str] | None:
    """The addresses that the request may go to; None: any."""
    fields = request.metadata_context.filter_metadata
    if _SUBSET_HINT not in fields or _SUBSET not in fields[_SUBSET_HINT].fields:
        return None
    value = fields[_SUBSET_HINT].fields[_SUBSET]
    if value.WhichOneof("kind") == "list_value":
        texts = [each.string_value for each in value.list_value.values]
    else:
        texts = value.string_value.split(",")
    return frozenset(filter(None, (text.strip() for text in texts)))


def served_by(request: Request) -> str:
    """The address that answers, "" if the gateway does not say."""
    fields = request.metadata_context.filter_metadata
    if _LB not in fields or _SERVED not in fields[_LB].fields:
        return ""
    return str(fields[_LB].fields[_SERVED].string_value)


# What the picker answers.


def to_engine(destination: str, changed: Iterable[Header], removed: Sequence[bytes]) -> Response:
    """The request goes to these addresses, with these headers."""
    response = ProcessingResponse()
    _mutate(response.request_headers.response.header_mutation, changed, removed)
    _set(
        response.request_headers.response.header_mutation,
        ((DESTINATION.encode(), destination.encode()),),
    )
    found = response.dynamic_metadata.fields[_LB].struct_value
    found.fields[DESTINATION].string_value = destination
    return response


def to_client(changed: Iterable[Header], removed: Sequence[bytes]) -> Response:
    """The head of the answer, with these changes."""
    response = ProcessingResponse()
    _mutate(response.response_headers.response.header_mutation, changed, removed)
    return response


def request_body(body: bytes | bytearray, *, ends: bool) -> Iterator[Response]:
    """The body for the engine. ends: whether no trailers follow."""
    for chunk, is_last in _chunks(body):
        response = ProcessingResponse()
        streamed = response.request_body.response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = chunk, ends and is_last
        yield response


def response_body(body: bytes | bytearray, *, ends: bool) -> Iterator[Response]:
    """A part of the answer. ends: whether it is the last one."""
    for chunk, is_last in _chunks(body):
        response = ProcessingResponse()
        streamed = response.response_body.response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = chunk, ends and is_last
        yield response


def request_trailers() -> Response:
    """The request's trailers go on as they are."""
    response = ProcessingResponse()
    response.request_trailers.SetInParent()
    return response


def response_trailers() -> Response:
    """The answer's trailers go on as they are."""
    response = ProcessingResponse()
    response.response_trailers.SetInParent()
    return response


def immediate(status: int, headers: Iterable[Header], body: bytes, details: str) -> Response:
    """The gateway answers this itself, and the request goes no further."""
    response = ProcessingResponse()
    answer = response.immediate_response
    answer.status.code, answer.body, answer.details = status, body, details
    _set(answer.headers, headers)
    return response


def _mutate(mutation: Any, changed: Iterable[Header], removed: Sequence[bytes]) -> None:
    _set(mutation, changed)
    mutation.remove_headers.extend(name.decode("latin-1") for name in removed)


def _set(mutation: Any, headers: Iterable[Header]) -> None:
    seen: set[bytes] = set()
    for name, value in headers:
        option = mutation.set_headers.add()
        option.header.key, option.header.raw_value = name.decode("latin-1"), value
        option.append_action = APPEND if name in seen else OVERWRITE
        seen.add(name)


def _chunks(body: bytes | bytearray) -> Iterator[tuple[bytes, bool]]:
    """The parts of a body, of an empty one an empty part, and whether each is the last."""
    if len(body) <= _CHUNK_BYTES:
        yield bytes(body), True
        return
    with memoryview(body) as view:
        for start in range(0, len(body), _CHUNK_BYTES):
            chunk = bytes(view[start : start + _CHUNK_BYTES])
            yield chunk, start + _CHUNK_BYTES >= len(body)
