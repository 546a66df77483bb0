"""Envoy's messages for external processing: read into plain values, and made of them.

Only this module knows how they look. A picker for another gateway would have another one. The part
of Envoy's API that is used is declared here: its messages, their fields and their numbers. What is
not declared is skipped when it is read. PyPI's xds-protos has all of it, and with it files of
OpenTelemetry's and Google's packages, which it overwrites in an environment that has both.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

_Field = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,  # of enumerations, too
}
_STRUCT = struct_pb2.DESCRIPTOR.name

# Of envoy.config.core.v3, envoy.type.v3 and envoy.service.ext_proc.v3. A field is its name, its
# number and its type; `*` stands for a list, `?` for one of a `oneof`.
_MESSAGES = {
    "HeaderValue": "key 1 string, value 2 string, raw_value 3 bytes",
    "HeaderMap": "headers 1 HeaderValue*",
    "HeaderValueOption": "header 1 HeaderValue, append_action 3 int32",
    "HttpStatus": "code 1 int32",
    "Metadata": "filter_metadata 1 FilterMetadataEntry*",
    "HttpHeaders": "headers 1 HeaderMap, end_of_stream 3 bool",
    "HttpBody": "body 1 bytes, end_of_stream 2 bool",
    "HttpTrailers": "trailers 1 HeaderMap",
    "ProtocolConfiguration": "request_body_mode 1 int32, response_body_mode 2 int32",
    "ProcessingRequest": "request_headers 2 HttpHeaders?, response_headers 3 HttpHeaders?, "
    "request_body 4 HttpBody?, response_body 5 HttpBody?, request_trailers 6 HttpTrailers?, "
    "response_trailers 7 HttpTrailers?, metadata_context 8 Metadata, "
    "protocol_config 11 ProtocolConfiguration",
    "HeaderMutation": "set_headers 1 HeaderValueOption*, remove_headers 2 string*",
    "StreamedBodyResponse": "body 1 bytes, end_of_stream 2 bool",
    "BodyMutation": "streamed_response 3 StreamedBodyResponse",
    "CommonResponse": "header_mutation 2 HeaderMutation, body_mutation 3 BodyMutation",
    "HeadersResponse": "response 1 CommonResponse",
    "BodyResponse": "response 1 CommonResponse",
    "TrailersResponse": "header_mutation 1 HeaderMutation",
    "ImmediateResponse": "status 1 HttpStatus, headers 2 HeaderMutation, body 3 bytes, "
    "details 5 string",
    "ProcessingResponse": "request_headers 1 HeadersResponse?, "
    "response_headers 2 HeadersResponse?, request_body 3 BodyResponse?, "
    "response_body 4 BodyResponse?, request_trailers 5 TrailersResponse?, "
    "response_trailers 6 TrailersResponse?, immediate_response 7 ImmediateResponse?, "
    "dynamic_metadata 8 Struct",
}
_PACKAGE = "sgl_ext.epp"


def _declared() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(
        name="sgl_ext/epp/envoy_api.proto",
        package=_PACKAGE,
        syntax="proto3",
        dependency=[_STRUCT],
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields.split(", "):
            _add(message, *field.split(" "))
        if "?" in fields:
            message.oneof_decl.add(name="message")
    (metadata,) = (each for each in file.message_type if each.name == "Metadata")
    entry = metadata.nested_type.add(name="FilterMetadataEntry")
    entry.options.map_entry = True
    _add(entry, "key", "1", "string")
    _add(entry, "value", "2", "Struct")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    return pool


def _add(message: descriptor_pb2.DescriptorProto, name: str, number: str, kind: str) -> None:
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    if kind.endswith("*"):
        field.label = _Field.LABEL_REPEATED
    if kind.endswith("?"):
        field.oneof_index = 0
    kind = kind.rstrip("*?")
    if kind in _TYPES:
        field.type = _TYPES[kind]
        return
    field.type = _Field.TYPE_MESSAGE
    of = {"Struct": ".google.protobuf", "FilterMetadataEntry": f".{_PACKAGE}.Metadata"}
    field.type_name = f"{of.get(kind, f'.{_PACKAGE}')}.{kind}"


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


_POOL = _declared()
ProcessingRequest = _class("ProcessingRequest")
ProcessingResponse = _class("ProcessingResponse")

# envoy.extensions.filters.http.ext_proc.v3.ProcessingMode.BodySendMode, in order.
BODY_SEND_MODES = ("NONE", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL", "FULL_DUPLEX_STREAMED")
# APPEND_IF_EXISTS_OR_ADD and OVERWRITE_IF_EXISTS_OR_ADD of a header.
APPEND, OVERWRITE = 0, 2


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
