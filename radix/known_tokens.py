"""Token ids that are known already: of recent prompts, and of pieces of text.

An agent's next prompt usually continues its last one. A prompt is stored with its last few cuts. A
cut is a place at which tokenization can resume: the ids before it do not depend on the text after
it, once `lookahead` further characters are equal.

    known    <sys> ... <user> hi <assistant> hello <end> <assistant>
    cuts          |          |              |           |
    new      <sys> ... <user> hi <assistant> hello <end> <user> thanks <assistant>
                                                    ^ resume here: the last cut they share

The ids of pieces of text are in an LRU cache bounded by bytes. A piece's key is a hash of its text,
and the ids that it finds replace that text in a prompt. So a client must not be able to make two
texts with the same hash. BLAKE2 (RFC 7693) with a random key for each process ensures that; a hash
that is only fast would not.
"""

import hashlib
import itertools
import secrets
import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

from radix.byte_lru import ByteLRU

# The memory of a piece without its token ids: a digest, an array, and their slots in a table that
# may just have grown.
PIECE_BYTES = 700
_DIGEST_BYTES = 16


class TokenPieces(ByteLRU["array[int]"]):
    """Token ids by the key of their piece, within `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes, PIECE_BYTES)
        self._hash_key = secrets.token_bytes(32)

    def key(self, *texts: str) -> bytes:
        """The key of a piece that consists of these texts."""
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=self._hash_key)
        for text in texts:
            data = text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.digest()

    def add_ids(self, key: bytes, ids: Sequence[int]) -> None:
        """Adds a piece's token ids, unless they alone exceed the bound."""
        added = array("q", ids)
        # Between arrays of many lengths, the allocator leaves up to a quarter unused.
        self.add(key, added, len(added) * added.itemsize * 5 // 4)


# The memory of a prompt without its text and ids: cuts, an array, table slots.
ENTRY_BYTES = 10_000
_MOST_PROMPTS = 512
_LEAST_CUTS, _MOST_CUTS = 8, 32
_PROBED_CHARS = 32


class Cut(NamedTuple):
    """After `chars` characters and `tokens` ids, where the added token `before` ends."""

    chars: int
    tokens: int
    before: str


@dataclass(frozen=True, slots=True)
class _Prompt:
    """parts: the text up to `lookahead` after the first cut, then up to after each next cut."""

    group: str
    parts: tuple[str, ...]
    ids: "array[int]"
    cuts: tuple[Cut, ...]
    size_bytes: int

    def shared_cuts(self, text: str) -> int:
        """How many of the cuts, each with its lookahead, are within a common prefix with `text`."""
        first = self.parts[0]
        probe = first[-_PROBED_CHARS:]
        # Prompts of other conversations often begin alike, and most differ here.
        if not text.startswith(probe, len(first) - len(probe)):
            return 0
        end = 0
        for number, part in enumerate(self.parts):
            if not text.startswith(part, end):
                return number
            end += len(part)
        return len(self.parts)


class KnownPrefix(NamedTuple):
    """A prefix of a text, up to a cut, with its ids in an array that the caller may change.

    number, cuts: the stored prompt that has this prefix, and how many of its cuts are in it.
    """

    cut: Cut
    ids: "array[int]"
    number: int
    cuts: int


class PromptHistory:
    """The most recent prompts, within `limit_bytes`. Thread-safe.

    lookahead: how many characters after a cut decide whether it is one.
    A prompt of one cache group is never found for another.
    """

    def __init__(self, limit_bytes: int, lookahead: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._lookahead = lookahead
        self._prompts: OrderedDict[int, _Prompt] = OrderedDict()
        self._added = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._prompts)

    def known_prefix(self, group: str, text: str) -> KnownPrefix | None:
        """The prefix that a text shares with the most recent prompt that it continues."""
        with self._lock:
            for number, prompt in reversed(self._prompts.items()):
                cuts = prompt.shared_cuts(text) if prompt.group == group else 0
                if cuts:
                    cut = prompt.cuts[cuts - 1]
                    return KnownPrefix(cut, prompt.ids[: cut.tokens], number, cuts)
        return None

    def add(
        self,
        group: str,
        text: str,
        ids: "array[int]",
        cuts: Sequence[Cut],
        continued: KnownPrefix | None = None,
    ) -> None:
        """Adds a prompt, in place of the one that it continues.

        cuts: some of the prompt's cuts after the known prefix, ascending.
        """
        cuts = [cut for cut in cuts if cut.chars + self._lookahead <= len(text)]
        with self._lock:
            before = None if continued is None else self._remove(continued.number)
            # Another thread may have replaced the prompt meanwhile.
            shared = 0 if continued is None or before is None else continued.cuts
            before = before or _Prompt(group, (), array("q"), (), 0)
            prompt = self._continue(before, shared, text, ids, cuts)
            if prompt is None or prompt.size_bytes > self.limit_bytes:
                return
            self._added += 1
            self._prompts[self._added] = prompt
            self.used_bytes += prompt.size_bytes
            while self.used_bytes > self.limit_bytes or len(self._prompts) > _MOST_PROMPTS:
                self._remove(next(iter(self._prompts)))

    def clear(self) -> None:
        """Removes all prompts."""
        with self._lock:
            self._prompts.clear()
            self.used_bytes = 0

    def check(self) -> None:
        """Asserts that `used_bytes` is the sum of the prompts and within the bound."""
        total = sum(prompt.size_bytes for prompt in self._prompts.values())
        assert self.used_bytes == total <= self.limit_bytes

    def _remove(self, number: int) -> _Prompt | None:
        removed = self._prompts.pop(number, None)
        if removed is not None:
            self.used_bytes -= removed.size_bytes
        return removed

    def _continue(
        self, before: _Prompt, shared: int, text: str, ids: "array[int]", new: Sequence[Cut]
    ) -> _Prompt | None:
        """The prompt that continues `before` after its first `shared` cuts; None if it has no cuts.

        It takes over the parts and the array of `before`: the common prefix may be long, and is
        not copied.
        """
        cuts, parts = [*before.cuts[:shared], *new], list(before.parts[:shared])
        if not cuts:
            return None
        ends = [cut.chars + self._lookahead for cut in cuts[shared:]]
        begin = cuts[shared - 1].chars + self._lookahead if shared else 0
        parts += [text[begin:end] for begin, end in itertools.pairwise([begin, *ends])]
        if len(cuts) > _MOST_CUTS:
            first = len(cuts) - _LEAST_CUTS
            cuts, parts = cuts[first:], ["".join(parts[: first + 1]), *parts[first + 1 :]]
        stored, common = before.ids, before.cuts[shared - 1].tokens if shared else 0
        stored[common:] = ids[common:]
        # Between texts and arrays of many lengths, the allocator leaves up to an eighth unused.
        size = (sum(map(sys.getsizeof, parts)) + sys.getsizeof(stored)) * 9 // 8
        return _Prompt(before.group, tuple(parts), stored, tuple(cuts), ENTRY_BYTES + size)
