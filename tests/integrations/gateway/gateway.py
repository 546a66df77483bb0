"""A picker in this process, and a gateway that speaks its protocol message by message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import orjson

from sgl_ext.balancer.server import Balancer
from sgl_ext.integrations.gateway.messages import (
    DESTINATION,
    FULL_DUPLEX_STREAMED,
    METHOD,
    ProcessingRequest,
    ProcessingResponse,
)
from sgl_ext.integrations.gateway.stream import EndpointPicker
from sgl_ext.settings.schema import PickerSettings
from tests.waiting import HANG_S

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"


class Picker:
    """A balancer with its endpoint picker. `address` is where gateways ask."""

    def __init__(self, balancer: Balancer, picker: EndpointPicker) -> None:
        self.balancer = balancer
        self.picker = picker
        self.address = f"127.0.0.1:{picker.port}"

    def metric(self, name: str, *labels: str) -> float:
        """A counter of the balancer."""
        return float(getattr(self.balancer.services.metrics, name).counts[labels])

    @property
    def in_flight(self) -> list[int]:
        return [worker.in_flight for worker in self.balancer.services.workers.all]


@asynccontextmanager
async def running_picker(
    workers: Sequence[str], *, interval_s: float = 0.02, **config: Any
) -> AsyncIterator[Picker]:
    """A picker over these workers."""
    given = {"workers": tuple(workers), "port": 0, "picker_port": 0, "drain_s": 0}
    given |= {"drain_min_s": 0, **config}
    settings = PickerSettings(**given)
    balancer = Balancer(settings, interval_s=interval_s)
    await balancer.start()
    picker = EndpointPicker(balancer, settings)
    await picker.start()
    try:
        yield Picker(balancer, picker)
    finally:
        await balancer.stop()
        await picker.stop()


class Asked:
    """One stream, as a gateway opens it for a request."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = channel.stream_stream(
            METHOD,
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )()

    async def head(
        self,
        path: str = CHAT,
        *,
        method: str = "POST",
        ends: bool = False,
        subset: Sequence[str] | None = None,
        modes: tuple[int, int] | None = (FULL_DUPLEX_STREAMED, FULL_DUPLEX_STREAMED),
        **headers: str,
    ) -> None:
        """Sends the request's head. Underscores of header names stand for hyphens."""
        message = ProcessingRequest()
        stated = {
            ":method": method,
            ":path": path,
            ":authority": "gateway",
            **({"content-type": "application/json"} if method == "POST" else {}),
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        for name, value in stated.items():
            header = message.request_headers.headers.headers.add()
            header.key, header.raw_value = name, value.encode("latin-1")
        message.request_headers.end_of_stream = ends
        if modes is not None:
            config = message.protocol_config
            config.request_body_mode, config.response_body_mode = modes
        if subset is not None:
            hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            values = hint.fields["x-gateway-destination-endpoint-subset"].list_value
            for address in subset:
                values.values.add().string_value = address
            values.SetInParent()
        await self.call.write(message)

    async def body(self, data: bytes, *, ends: bool = True) -> None:
        """Sends a part of the request's body."""
        message = ProcessingRequest()
        message.request_body.body, message.request_body.end_of_stream = data, ends
        await self.call.write(message)

    async def trailers(self) -> None:
        """Ends the request's body with trailers."""
        message = ProcessingRequest()
        message.request_trailers.SetInParent()
        await self.call.write(message)

    async def answer_head(
        self, status: int | str = 200, *, ends: bool = False, served: str = "", **headers: str
    ) -> None:
        """Sends the head of the engine's answer."""
        message = ProcessingRequest()
        stated = {":status": str(status), "content-type": "application/json", **headers}
        for name, value in stated.items():
            header = message.response_headers.headers.headers.add()
            header.key, header.raw_value = name.replace("_", "-"), value.encode()
        message.response_headers.end_of_stream = ends
        if served:
            found = message.metadata_context.filter_metadata["envoy.lb"]
            found.fields[f"{DESTINATION}-served"].string_value = served
        await self.call.write(message)

    async def answer_body(self, data: bytes, *, ends: bool = True) -> None:
        """Sends a part of the engine's answer."""
        message = ProcessingRequest()
        message.response_body.body, message.response_body.end_of_stream = data, ends
        await self.call.write(message)

    async def answer_trailers(self) -> None:
        """Ends the engine's answer with trailers."""
        message = ProcessingRequest()
        message.response_trailers.SetInParent()
        await self.call.write(message)

    async def told(self) -> Any:
        """The picker's next message."""
        async with asyncio.timeout(HANG_S):
            message = await self.call.read()
        assert message is not grpc.aio.EOF, "the picker has ended the stream"
        return message

    async def request(self, body: Any = None, **head: Any) -> tuple[str, bytes]:
        """Sends a whole request; returns the destination and the body for the engine."""
        await self.head(**head)
        await self.body(orjson.dumps({"model": "m", "messages": []} if body is None else body))
        return await self.picked()

    async def picked(self) -> tuple[str, bytes]:
        """The destination, and the body for the engine."""
        message = await self.told()
        assert message.WhichOneof("message") == "request_headers", message
        self.changed = {
            option.header.key: option.header.raw_value.decode()
            for option in message.request_headers.response.header_mutation.set_headers
        }
        self.removed = [*message.request_headers.response.header_mutation.remove_headers]
        metadata = message.dynamic_metadata.fields["envoy.lb"].struct_value
        assert metadata.fields[DESTINATION].string_value == self.changed[DESTINATION]
        return self.changed[DESTINATION], await self.whole("request_body")

    async def whole(self, kind: str) -> bytes:
        """A body that the picker sends on, to its end."""
        parts = []
        while True:
            message = await self.told()
            assert message.WhichOneof("message") == kind, message
            streamed = getattr(message, kind).response.body_mutation.streamed_response
            parts.append(streamed.body)
            if streamed.end_of_stream:
                return b"".join(parts)

    async def answered(self) -> tuple[int, dict[str, str], Any]:
        """What the gateway shall answer by itself."""
        message = await self.told()
        assert message.WhichOneof("message") == "immediate_response", message
        answer = message.immediate_response
        headers = {o.header.key: o.header.raw_value.decode() for o in answer.headers.set_headers}
        return answer.status.code, headers, orjson.loads(answer.body)

    async def complete(self, body: bytes = b"{}") -> bytes:
        """The engine answers; returns what the client gets."""
        await self.answer_head()
        await self.answer_body(body)
        message = await self.told()
        assert message.WhichOneof("message") == "response_headers", message
        return await self.whole("response_body")
