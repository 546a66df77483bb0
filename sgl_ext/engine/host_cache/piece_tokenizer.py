"""Tokenizes a prompt by computing the tokens of new pieces only.

A tokenizer first finds its added tokens (`<|im_start|>` and the like) in the text, and then works
on each piece between two of them by itself. So a piece has the same tokens wherever the same added
token stands before it, and prompts, which grow at their end, consist of the same pieces over and
over. An added token may change its neighbours (by stripping blanks, for example), so a piece is
tokenized together with the added token before it.

Tokenizers of the `tokenizers` library work like that, and some options break it. So `proven`
compares both ways on texts made to tell them apart, on the tokenizer that is loaded, and `differs`
compares them on a prompt that was really sent.
"""

from __future__ import annotations

import itertools
import re
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from radix.prompt_history import Cut, PromptHistory
from radix.token_pieces import TokenPieces

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
