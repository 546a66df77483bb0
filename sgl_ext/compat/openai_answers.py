"""Several choices of one OpenAI answer, and the places of their tokens, as OpenAI writes them.

    "id"            of a stream with several choices: SGLang writes that of each choice's request
    "text_offset"   of log probabilities on completions: SGLang writes -1 for each token
    "metadata"      SGLang adds a list to it, for which clients with strict types reject the answer

Other answers pass unchanged.

    fault     choices of one stream have several ids, tokens no places, and metadata is not text
              alone
    hooks     group "answers of OpenAI", and a middleware
    test      tests/compat/test_openai_answers.py
    upstream  no patch yet
    ends with a version whose answers follow OpenAI's schema
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson
from starlette.datastructures import Headers, MutableHeaders

from sgl_ext.engine.core.request_context import context_in
from sgl_ext.engine.sglang_types import Original
from sgl_ext.protocols.chat import CHAT
from sgl_ext.protocols.registry import COMPLETIONS

_PATHS = frozenset((*CHAT.paths, *COMPLETIONS.paths))
_ID = re.compile(rb'^data: \{"id":"([^"\\]*)"', re.MULTILINE)
_EVENT = re.compile(rb"^data: (\{.*\})$", re.MULTILINE)


class ChoicesMiddleware:
    """An ASGI application around another."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] not in _PATHS:
            await self.app(scope, receive, send)
            return
        scope.setdefault("state", {})
        start: Any = None  # the head of a whole answer, whose length changes
        parts: list[bytes] = []
        answer: _Answer | None = None

        async def complete(message: Any) -> None:
            nonlocal start, answer
            if message["type"] == "http.response.start" and message["status"] == HTTPStatus.OK:
                context = context_in(scope)
                kind = Headers(raw=message["headers"]).get("content-type", "")
                is_stream = "event-stream" in kind
                answer = None if context is None else _Answer.of(context.body, scope["path"])
                if answer is not None and answer.has_offsets and not is_stream:
                    start = message
                    return
            elif answer is not None and message["type"] == "http.response.body":
                data = message.get("body", b"")
                if start is None:
                    message = {**message, "body": answer.event(data)}
                else:
                    parts.append(data)
                    if message.get("more_body", False):
                        return
                    body = answer.whole(b"".join(parts))
                    headers = MutableHeaders(raw=list(start["headers"]))
                    headers["content-length"] = str(len(body))
                    await send({**start, "headers": headers.raw})
                    message = {**message, "body": body}
            await send(message)

        await self.app(scope, receive, complete)


class _Answer:
    """One answer. has_offsets: it has log probabilities of a completion."""

    def __init__(self, *, has_offsets: bool) -> None:
        self.has_offsets = has_offsets
        self._id = b""
        self._lengths: dict[int, int] = defaultdict(int)

    @classmethod
    def of(cls, body: Any, path: str) -> "_Answer | None":
        """The answer of a request; None if it needs no change."""
        if not isinstance(body, Mapping):
            return None
        is_completion = path in COMPLETIONS.paths
        has_offsets = is_completion and body.get("logprobs") is not None
        prompts = body.get("prompt") if is_completion else None
        is_batch = isinstance(prompts, list) and len(prompts) > 1 and type(prompts[0]) is not int
        has_many = is_batch or body.get("n") not in (None, 1)
        return cls(has_offsets=has_offsets) if has_offsets or has_many else None

    def event(self, data: bytes) -> bytes:
        """An event of its stream, or several."""
        if found := _ID.search(data):
            self._id = self._id or found[1]
            data = _ID.sub(lambda _: b'data: {"id":"%b"' % self._id, data)
        if self.has_offsets:
            data = _EVENT.sub(lambda found: b"data: " + self.whole(found[1]), data)
        return data

    def whole(self, data: bytes) -> bytes:
        """A whole answer, or the JSON of one event."""
        document = orjson.loads(data)
        for choice in document.get("choices") or ():
            logprobs = choice.get("logprobs")
            if isinstance(logprobs, dict):
                logprobs["text_offset"] = self._offsets(choice["index"], logprobs["tokens"])
        return orjson.dumps(document)

    def _offsets(self, index: int, tokens: list[str]) -> list[int]:
        """Where each token begins in the text of its choice."""
        offsets = []
        for token in tokens:
            offsets.append(self._lengths[index])
            self._lengths[index] += len(token)
        return offsets


def text_metadata(original: Original, meta_info: Any) -> dict[str, str] | None:
    """Around `build_endpoint_weight_version_metadata`: `metadata` with texts only.

    SGLang adds the list of weight versions, for which clients with strict types reject the answer.
    """
    metadata = original(meta_info)
    return metadata and {key: text for key, text in metadata.items() if isinstance(text, str)}
