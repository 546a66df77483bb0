"""Several choices of one OpenAI answer, and the places of their tokens, as OpenAI writes them.

    "id"            of a stream with several choices: SGLang writes that of each choice's request
    "text_offset"   of log probabilities on completions: SGLang writes -1 for each token
    "metadata"      SGLang adds a list to it, for which clients with strict types reject the answer
    "logprobs"      of a chat: SGLang gives those of thinking and calls, too

Other answers pass unchanged.

    fault     choices of one stream have several ids, tokens no places, chats the log
              probabilities of their thinking, and metadata is not text alone
    hooks     none: a middleware
    test      tests/compat/test_openai_answers.py
    upstream  no patch yet
    ends with a version whose answers follow OpenAI's schema
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import orjson

from sgl_ext.compat.text_logprobs import Token, Tokens
from sgl_ext.engine.core.request_context import RequestContext
from sgl_ext.protocols.chat import CHAT
from sgl_ext.protocols.registry import COMPLETIONS

PATHS = frozenset((*CHAT.paths, *COMPLETIONS.paths))
_ID = re.compile(rb'^data: \{"id":"([^"\\]*)"', re.MULTILINE)
_LIST = b'"weight_versions"'
_EVENT = re.compile(rb"^data: (\{.*\})$", re.MULTILINE)


class Choices:
    """The choices of one answer.

    has_offsets: it has log probabilities of a completion. has_logprobs: it has those of a chat.
    """

    changes_whole = True  # its metadata

    def __init__(self, context: RequestContext, *, has_offsets: bool, has_logprobs: bool) -> None:
        self._context = context
        self._has_offsets = has_offsets
        self._has_logprobs = has_logprobs
        self._id = b""
        self._lengths: dict[int, int] = {}
        self._tokens: dict[int, Tokens] = defaultdict(Tokens)
        self._texts: dict[int, list[str]] = defaultdict(list)  # whose tokens have not come

    @classmethod
    def of(cls, context: RequestContext, path: str) -> "Choices | None":
        """The answer of a request; None if it needs no change."""
        body = context.body
        if not isinstance(body, Mapping):
            return None
        is_completion = path in COMPLETIONS.paths
        has_offsets = is_completion and body.get("logprobs") is not None
        has_logprobs = not is_completion and body.get("logprobs") is True
        prompts = body.get("prompt") if is_completion else None
        is_batch = isinstance(prompts, list) and len(prompts) > 1 and type(prompts[0]) is not int
        has_many = is_batch or body.get("n") not in (None, 1)
        if body.get("stream") is True and not (has_offsets or has_logprobs or has_many):
            return None
        return cls(context, has_offsets=has_offsets, has_logprobs=has_logprobs)

    def event(self, data: bytes) -> bytes:
        """An event of its stream, or several."""
        if found := _ID.search(data):
            self._id = self._id or found[1]
            data = _ID.sub(lambda _: b'data: {"id":"%b"' % self._id, data)
        if self._has_offsets or self._has_logprobs:
            data = _EVENT.sub(lambda found: b"data: " + self.whole(found[1]), data)
        return data

    def whole(self, data: bytes) -> bytes:
        """A whole answer, or the JSON of one event."""
        if not (self._has_offsets or self._has_logprobs or _LIST in data):
            return data
        document = orjson.loads(data)
        if metadata := document.get("metadata"):
            texts = {key: text for key, text in metadata.items() if isinstance(text, str)}
            document["metadata"] = texts
        for choice in document.get("choices") or ():
            logprobs = choice.get("logprobs")
            if self._has_logprobs:
                self._leave_text(choice, logprobs)
            elif self._has_offsets and isinstance(logprobs, dict):
                logprobs["text_offset"] = self._offsets(choice, logprobs["tokens"])
        return orjson.dumps(document)

    def _leave_text(self, choice: Any, logprobs: Any) -> None:
        """Leaves a choice the log probabilities of its text.

        SGLang gives a part of an answer those of all tokens so far, and so those of its thinking
        and its calls. Text can come later than its tokens.
        """
        said = choice.get("message") or choice.get("delta") or {}
        tokens = self._tokens[choice["index"]]
        given = (logprobs or {}).get("content") or ()
        tokens.add([Token(each["token"], each["logprob"], (each,)) for each in given])
        thinking, text = said.get("reasoning_content") or "", said.get("content") or ""
        if tokens.know(thinking):
            tokens.of(thinking)
        words = [each for each in self._context.parts if isinstance(each, str)]
        texts = self._texts[choice["index"]]
        texts += words if "message" in choice and "".join(words) == text else [text]
        found = []
        while texts and (tokens.know(texts[0]) or choice.get("finish_reason")):
            found += [token.top[0] for token in tokens.of(texts.pop(0))]
        for call in said.get("tool_calls") or ():
            arguments = call["function"].get("arguments") or ""
            if tokens.know(arguments):
                tokens.of(arguments)
        if found or isinstance(logprobs, dict):
            choice["logprobs"] = {**(logprobs or {"refusal": None}), "content": found}

    def _offsets(self, choice: Any, tokens: list[str]) -> list[int]:
        """Where each token begins in the text of its choice."""
        index = choice["index"]
        if index not in self._lengths:  # a prompt that is repeated may have no tokens
            repeated = len(choice.get("text") or "") - sum(map(len, tokens))
            self._lengths[index] = max(repeated, 0) if self._context.body.get("echo") else 0
        offsets = []
        for token in tokens:
            offsets.append(self._lengths[index])
            self._lengths[index] += len(token)
        return offsets
