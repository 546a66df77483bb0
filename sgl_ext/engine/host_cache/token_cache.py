"""In the HTTP process: the tokens of earlier prompts, so that a prompt needs only its new ones.

It is proven on the loaded tokenizer
before the server takes requests, and checked on a prompt now and then while it serves. Where its
tokens are not SGLang's, the cache turns itself off: SGLang tokenizes, and a log line and a counter
say why.

A tokenizer first finds its added tokens (`<|im_start|>` and the like) in the text, and then works
on each piece between two of them by itself. So a piece has the same tokens wherever the same added
token stands before it, and prompts, which grow at their end, consist of the same pieces over and
over. An added token may change its neighbours (by stripping blanks, for example), so a piece is
tokenized together with the added token before it.

Tokenizers of the `tokenizers` library work like that, and some options break it. So `proven`
compares both ways on texts made to tell them apart, on the tokenizer that is loaded, and `differs`
compares them on a prompt that was really sent.

The prompts of DeepSeek V4 are a text in which some places are special tokens. Its encoder takes the
rest as plain text: where it spells a special token, it gets other tokens than
the text as a whole would. Such a prompt is left to the encoder, and any other one is tokenized by
the token cache.

Where nothing needs a list, the tokens go to the scheduler as one array. SGLang expects a prompt's
token ids as a list and converts it into an array to send it to the scheduler. For a request of one
text prompt it only counts the ids, looks at the first and cuts off the end, and all of this works
on an array, which has no Python object for each id. Requests for which SGLang may do more (several
answers, media, an answer to continue, dumps and logs of requests) get a list.
"""

from __future__ import annotations

import itertools
import logging
import re
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import unwrap
from typing import Any, NamedTuple

import numpy as np

from radix.known_tokens import Cut, PromptHistory, TokenPieces
from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.request_context import current
from sgl_ext.engine.host_cache.worth import Worth, turned_off
from sgl_ext.engine.sglang_http_types import GenerateReqInput, ServingChat, TokenizerManager


def is_array_allowed(chat: ServingChat, request: Any) -> bool:
    """Whether the ids may be an array while SGLang converts a request: it is one text prompt."""
    manager, calls = chat.tokenizer_manager, chat.tool_call_parser
    call_parser = sglang_api.FunctionCallParser.ToolCallParserEnum.get(calls)
    return not (
        manager.model_config.is_multimodal
        or manager.mm_processor is not None
        # SGLang adds the answer's beginning to the list.
        or getattr(request, "continue_final_message", False)
        # These parsers decode the prompt's ids.
        or isinstance(chat._reasoning_detector, sglang_api.ResponseTemplateReasoningDetector)
        or issubclass(call_parser or object, sglang_api.ResponseTemplateToolDetector)
    )


def restore_list(chat: ServingChat, converted: GenerateReqInput) -> None:
    """Makes the converted request's ids a list if SGLang does more with them than send them."""
    sampling = converted.sampling_params
    is_one = (
        isinstance(sampling, dict)
        and sampling.get("n", 1) == 1
        and (sampling.get("beam_width") or 1) == 1
    )
    if type(converted.input_ids) is array and not (is_one and is_only_sent(chat.tokenizer_manager)):
        converted.input_ids = converted.input_ids.tolist()


def is_only_sent(manager: TokenizerManager) -> bool:
    """Whether SGLang only sends the ids of a request to the scheduler, and logs or dumps none."""
    return not (
        manager.request_logger.log_requests
        or manager.dump_requests_folder
        or manager.crash_dump_folder
        or manager.request_metrics_exporter_manager.exporter_enabled()
    )


Encode = Callable[[str], list[int]]
EncodeMany = Callable[[Sequence[str]], list[list[int]]]

# What may tokenize differently at the edge of a piece: blanks of all kinds, a letter that composes
# with the one before, a joiner, half a word or number, bytes that are no letter, what normalizers
# rewrite.
# fmt: off
_EDGES = (
    "", " ", "  ", "\n", " \n\n\t ", "a", " a", "a ", "'s", "12", "3456", "\u0301e", "e\u0301",
    "\u200d\U0001f469", "\ufb01", "\u00a0x", "\u3000", "\u2581", "\u2581a", "<", "<|", "|>",
    "\x00", "\ufffd", "Z\u0327",
)
# fmt: on
_MOST_SAMPLED = 256
# Of a shorter prompt, looking up its pieces is as quick.
_LONG_TOKENS = 1_000
_CUTS = 6
_BODIES = ("word", "Hello, world", 'def f(x):\n    return {"a": [1, 2.5e3]}\n', "\u4f60\u597d", "")


class Inexact(Exception):
    """A piece does not begin with the added token before it: this tokenizer has no pieces."""


class _New(NamedTuple):
    """A piece that is not cached, the added token before it or "", and where its tokens go."""

    before: str
    piece: str
    place: array[int]


class PieceTokenizer:
    """Encodes as `encode` does, piece by piece. It is thread-safe.

    added: the tokenizer's added tokens, at which texts are cut, each with its number.
    encode_many: several texts at once, each as `encode` would.
    long_tokens: prompts of at least this length are also cached as a whole.
    new_tokens, new_chars, new_s: the tokens and characters of new pieces, and their tokenization.
    """

    def __init__(
        self,
        added: Mapping[str, int],
        encode: Encode,
        encode_many: EncodeMany,
        limit_bytes: int,
        long_tokens: int = _LONG_TOKENS,
    ) -> None:
        self._added = {name: array("q", (number,)) for name, number in added.items()}
        self._encode = encode
        self._encode_many = encode_many
        self._long_tokens = long_tokens
        # Of several that match, the tokenizer takes the longest.
        longest_first = sorted(self._added, key=len, reverse=True)
        self._cut = re.compile("|".join(map(re.escape, longest_first)))
        self.pieces = TokenPieces(limit_bytes - limit_bytes // 2)
        ahead = len(longest_first[0]) if longest_first else 0
        self.prompts = PromptHistory(limit_bytes // 2, ahead)
        self.new_tokens = self.new_chars = 0
        self.new_s = 0.0

    def encode(self, text: str, space: str = "") -> array[int]:
        """The text's tokens, 8 bytes each, as a new array. Spaces do not find each other's pieces.

        Raises Inexact.
        """
        known = self.prompts.known_prefix(space, text)
        if known is None:
            tokens, before, at = array("q"), "", 0
        else:
            tokens, before, at = known.ids, known.cut.before, known.cut.chars
        found: list[array[int]] = []
        ends: dict[int, tuple[int, str]] = {}  # by how much is found, each cut and its added token
        missing: dict[bytes, _New] = {}
        for match in itertools.chain(self._cut.finditer(text, at), [None]):
            end = len(text) if match is None else match.start()
            if end > at:
                name = self.pieces.key(space, before, text[at:end])
                cached = self.pieces.get(name)
                if cached is None:
                    new = _New(before, text[at:end], array("q"))
                    cached = missing.setdefault(name, new).place
                found.append(cached)
            if match is not None:
                before, at = match.group(), match.end()
                found.append(self._added[before])
                ends[len(found)] = at, before
        if missing:
            self._fill(missing)
        cuts: list[Cut] = []
        for count, part in enumerate(found, start=1):
            tokens.extend(part)
            if count in ends:
                chars, before = ends[count]
                cuts.append(Cut(chars, len(tokens), before))
        if len(tokens) >= self._long_tokens:
            self.prompts.add(space, text, tokens, cuts[-_CUTS:], known)
        return tokens

    def clear(self) -> None:
        """Removes everything from the cache."""
        self.pieces.clear()
        self.prompts.clear()

    def proven(self) -> bool:
        """Whether both ways agree on texts made to tell them apart. Clears the cache."""
        try:
            # Twice: with new pieces, and with cached ones.
            agree = not any(self.differs(text) for _ in range(2) for text in self._samples())
        except Inexact:
            agree = False
        self.clear()
        self.new_tokens = 0
        return agree

    def differs(self, text: str) -> bool:
        """Whether the tokenizer makes other tokens of a text. Raises Inexact."""
        return self._encode(text) != self.encode(text).tolist()

    def _fill(self, missing: Mapping[bytes, _New]) -> None:
        """Tokenizes new pieces, into the arrays that were reserved for them."""
        texts = [new.before + new.piece for new in missing.values()]
        begun_s = time.perf_counter()
        many = self._encode_many(texts)
        self.new_s += time.perf_counter() - begun_s
        self.new_chars += sum(map(len, texts))
        for (name, new), tokens in zip(missing.items(), many, strict=True):
            if new.before:
                if tokens[:1] != self._added[new.before].tolist():
                    raise Inexact(new.before)
                tokens = tokens[1:]
            new.place.fromlist(tokens)
            self.pieces.add_ids(name, tokens)
            self.new_tokens += len(tokens)

    def _samples(self) -> Iterable[str]:
        names = list(self._added)[:_MOST_SAMPLED]
        few = names[:3] + names[-3:]
        for edge, token in itertools.product(_EDGES, few):
            for body in _BODIES:
                yield f"{body}{edge}{token}{edge}{body}"
        for one, other in itertools.product(few, few):
            yield f"{one}{other}"
            yield f"{one} {other}x{one}\n{other} "
        for token in names:
            yield f"a {token} b\n{token}\nc"
            yield f"{token[:-1]}{token[1:]} {token}"


CHECK_EVERY_S = 60.0
# A check tokenizes a whole prompt, which takes seconds for a million tokens.
_CHECKED_SHARE = 0.01
_logger = logging.getLogger(__name__)

Original = Callable[..., list[int]]


class _Before(NamedTuple):
    """The clock and what was tokenized, before a prompt."""

    begun_s: float
    new_tokens: int
    new_chars: int
    new_s: float


class TokenCache:
    """Encodes prompts for one tokenizer. `original` encodes as SGLang does.

    prompts: how many it has encoded. worth: its account, in characters.
    """

    def __init__(self, tokenizer: Any, original: Original, limit_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._original = original
        added_tokens = self._backend.get_added_tokens_decoder().items()
        added = {
            token.content: number
            for number, token in added_tokens
            if token.content and not token.normalized
        }
        self._added = {token.content: number for number, token in added_tokens}
        self._added_ids = np.array(list(self._added.values()), dtype=np.int64)
        self._pieces = PieceTokenizer(added, self._whole, self._many, limit_bytes)
        self._checked_s = time.monotonic()
        self._check_after_s = CHECK_EVERY_S
        self.is_off = False
        self.prompts = 0
        self.worth = Worth("tokens")

    @property
    def new_tokens(self) -> int:
        """How many tokens were not found in the cache."""
        return self._pieces.new_tokens

    @property
    def used_bytes(self) -> int:
        """The size of what it holds."""
        return self._pieces.pieces.used_bytes + self._pieces.prompts.used_bytes

    @property
    def limit_bytes(self) -> int:
        """The bound of that."""
        return self._pieces.pieces.limit_bytes + self._pieces.prompts.limit_bytes

    def prove(self) -> None:
        """Turns the cache off unless its tokens are the tokenizer's on texts made to tell."""
        if self._has_options():
            self.turn_off("options")
        elif not self._pieces.proven():
            self.turn_off("inexact")

    def turn_off(self, why: str) -> None:
        """SGLang tokenizes from now on."""
        self.is_off = True
        self._pieces.clear()
        counter("token_cache_disabled").labels(why).inc()
        _logger.warning("sgl-ext: the token cache is off: its tokens are not SGLang's (%s)", why)

    def serves(self, tokenizer: Any, options: dict[str, Any] | None) -> bool:
        """Whether the cache may encode a prompt for this tokenizer with these options."""
        options = options or {}
        if self.is_off or tokenizer is not self._tokenizer or not self.worth.is_on():
            return False
        if options.keys() - {"add_special_tokens"} or self._has_options():
            return False
        processor = self._backend.post_processor
        adds = processor is not None and processor.num_special_tokens_to_add(False) > 0
        return not (adds and options.get("add_special_tokens", True))

    def serves_backend(self, backend: Any) -> bool:
        """Whether the cache may encode texts for the library's tokenizer itself."""
        is_served = not self.is_off and backend is self._backend and not self._has_options()
        return is_served and self.worth.is_on()

    def added_before(self) -> list[int] | None:
        """What the tokenizer puts before a text; None if it puts something after it, too."""
        before: list[int] = self._backend.encode("").ids
        plain: list[int] = self._backend.encode("a", add_special_tokens=False).ids
        return before if self._backend.encode("a").ids == before + plain else None

    def encode(self, text: str, group: str | None = None) -> array[int]:
        """A prompt's tokens. Cache groups do not find each other's pieces."""
        before = self._before()
        try:
            tokens = self._pieces.encode(text, _space(group))
        except Inexact:
            self.turn_off("inexact")
            return array("q", self._whole(text))
        self._note(tokens, text, before, lambda: self._whole(text))
        return tokens

    def encode_with(
        self,
        added: Sequence[str],
        text: str,
        group: str | None,
        whole: Callable[[], list[int]],
    ) -> array[int] | None:
        """As `encode`; None if the text's added tokens are not exactly these, in their order.

        whole: how SGLang makes the tokens, for the checks.
        """
        before = self._before()
        try:
            tokens = self._pieces.encode(text, _space(group))
        except Inexact:
            self.turn_off("inexact")
            return None
        ids = np.frombuffer(tokens, dtype=np.int64)
        found = ids[np.isin(ids, self._added_ids)].tolist()
        if found != [self._added.get(token) for token in added]:
            counter("prompt_tokens_encoded").labels("new").inc(len(tokens))
            self._weigh(before, 0)
            return None
        self._note(tokens, text, before, whole)
        return tokens

    def _before(self) -> _Before:
        pieces = self._pieces
        return _Before(self.worth.now(), pieces.new_tokens, pieces.new_chars, pieces.new_s)

    def _weigh(self, before: _Before, chars: int) -> None:
        """Notes what a prompt of so many characters took, for the cache's worth."""
        pieces, took_s = self._pieces, self.worth.now() - before.begun_s
        if pieces.new_chars > before.new_chars:
            self.worth.learn(pieces.new_chars - before.new_chars, pieces.new_s - before.new_s)
        if self.worth.note(took_s, chars):
            turned_off(self.worth)
            pieces.clear()

    def _note(
        self, tokens: array[int], text: str, before: _Before, whole: Callable[[], list[int]]
    ) -> None:
        """Counts a prompt's tokens, and checks them now and then."""
        self.prompts += 1
        new = self._pieces.new_tokens - before.new_tokens
        self._weigh(before, len(text))
        counter("prompt_tokens_encoded").labels("known").inc(max(len(tokens) - new, 0))
        counter("prompt_tokens_encoded").labels("new").inc(new)
        if time.monotonic() - self._checked_s >= self._check_after_s:
            self._checked_s = time.monotonic()
            ids = tokens.tolist()

            def check() -> None:
                begun_s = self.worth.now()
                expected = whole()
                took_s = self.worth.now() - begun_s
                self._check_after_s = max(CHECK_EVERY_S, took_s / _CHECKED_SHARE)
                self.worth.learn(len(text), took_s)
                self.check(expected, ids)

            threading.Thread(target=check, daemon=True).start()

    def check(self, whole: list[int], tokens: list[int]) -> None:
        """Turns the cache off unless a prompt's tokens are those that SGLang makes of it."""
        counter("token_cache_checks").inc()
        if whole != tokens:
            self.turn_off("differs")

    def _has_options(self) -> bool:
        """Whether an option makes the tokenizer do more than encode, or ignore added tokens."""
        backend = self._backend
        return bool(
            backend.truncation is not None
            or backend.padding is not None
            or backend.encode_special_tokens
            or getattr(self._tokenizer, "split_special_tokens", False)
        )

    def _whole(self, text: str) -> list[int]:
        return list(self._original(self._tokenizer, text, {"add_special_tokens": False}))

    def _many(self, texts: Sequence[str]) -> list[list[int]]:
        # SGLang spreads a long text over cores, and the library spreads many short ones.
        if len(texts) == 1:
            return [self._whole(texts[0])]
        encodings = self._backend.encode_batch(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


def _space(group: str | None) -> str:
    return "" if group is None else f"g{group}"


def make_token_cache(tokenizer: Any, limit_bytes: int) -> TokenCache | None:
    """The cache for an engine's tokenizer, proven on it; None: 0 bytes, or no fast tokenizer."""
    if not limit_bytes:
        return None
    if not getattr(tokenizer, "is_fast", False):
        counter("token_cache_disabled").labels("slow").inc()
        _logger.warning("sgl-ext: the token cache is off: this tokenizer is not a fast one")
        return None
    cache = TokenCache(tokenizer, unwrap(sglang_api.parallel_prompt_encode), limit_bytes)
    cache.prove()
    return cache


class RecipeEncoding:
    """Takes the place of `encoding`, which deepseek-recipe made for `tokenizer`.

    The first prompt is encoded in both ways. If they differ, the cache turns itself off.
    """

    def __init__(
        self, encoding: Any, tokenizer: Any, token_cache: Callable[[], TokenCache | None]
    ) -> None:
        self._encoding = encoding
        self._tokenizer = tokenizer
        self._token_cache = token_cache
        self._is_proven = False

    def render_conversation(self, conversation: Any) -> Any:
        """The prompt as text, with the ranges of its special tokens."""
        return self._encoding.render_conversation(conversation)

    def encode(self, conversation: Any) -> list[int]:
        """The tokens of a conversation's prompt."""
        cache = self._token_cache()
        if cache is not None and cache.serves_backend(self._tokenizer):
            tokens = self._cached(cache, conversation)
            if tokens is not None:
                return tokens
        return self._whole(conversation)

    def _cached(self, cache: TokenCache, conversation: Any) -> list[int] | None:
        rendered = self._encoding.render_conversation(conversation)
        text, context = rendered.prompt, current()
        special = [text[start:end] for start, end in rendered.special_ranges]
        group = None if context is None else context.group
        tokens = cache.encode_with(special, text, group, lambda: self._whole(conversation))
        if tokens is None:
            return None
        found = tokens.tolist()
        if not self._is_proven:
            cache.check(self._whole(conversation), found)
            self._is_proven = not cache.is_off
        return None if cache.is_off else found

    def _whole(self, conversation: Any) -> list[int]:
        return list(self._encoding.encode(conversation))
