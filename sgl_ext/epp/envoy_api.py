"""The part of Envoy's API that is used here: its messages, their fields and their numbers.

PyPI's xds-protos has all of it, and with it files of OpenTelemetry's and Google's packages, which
it overwrites in an environment that has both. What is not declared here is skipped when it is read.
"""

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
