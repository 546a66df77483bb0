"""Where prompts diverge, without their texts: what is remembered of a prompt are hashes.

    a prompt whose head is known, and that continues its conversation's last one .. nothing to do
    its head is new: a sketch of it is made, and compared with
      that of its conversation's last prompt ................... it diverges between turns
      those of its group's other sessions ...................... it diverges between sessions
      that of the client's version before ...................... a new version moves a byte
    its messages are not those of the last prompt and more ...... they were rewritten or cut

The head is the tools and the instructions. Its sketch has the hash of each piece of PIECE_BYTES,
and each line begins a piece: so the place of a difference is right to a piece, and pieces that
follow an inserted line are still found. Hashes are those of this process (`hash`), which no other
can compute. What kind of text changes is guessed from the later prompt alone.

Most requests cost two look-ups. The others take a bounded part of the time: `diagnosis.py`.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sgl_ext.prompts.blocks import SYSTEM, Block
from sgl_ext.prompts.compare import COMPACTION, kind_at
from sgl_ext.prompts.prompt import FLEET, SESSION
from sgl_ext.reading.places import common_prefix
from sgl_ext.reading.segments import Chain

PIECE_BYTES = 32
VERSION = "version"
"""The scope of what a new version of a client changes."""
NEW_VERSION = "new_version"
"""Its kind, where all prompts of the new version begin alike."""
LIMIT_BYTES = 16 * 1024 * 1024
_MOST_CONVERSATIONS = 16_384
_MOST_GROUPS = 1024
_MOST_HEADS = 4096
_MOST_VERSIONS = 4
_WATCHED = 10
_MIN_LOST_BYTES = 512
_SEGMENT_BYTES = 88
_ENTRY_BYTES = 400


class Sketch(NamedTuple):
    """The tools and instructions of a prompt, as hashes of their pieces.

    ends: the length of the canonical text up to the end of each piece. labels: for each piece, the
    number of its block. blocks: label, part, and where its text begins.
    """

    pieces: tuple[int, ...]
    ends: tuple[int, ...]
    block_of: tuple[int, ...]
    blocks: tuple[tuple[str, str, int], ...]

    @property
    def size_bytes(self) -> int:
        """What it takes of memory, about."""
        return 56 * len(self.pieces) + 200 * len(self.blocks) + _ENTRY_BYTES


class Place(NamedTuple):
    """Where a head diverges: its block, the byte in it, and how many bytes that were alike are
    lost. at_bytes: the length of the canonical text before it."""

    block: str
    part: str
    byte: int
    at_bytes: int
    lost_bytes: int


def sketch_of(blocks: Sequence[Block]) -> Sketch:
    """The sketch of a prompt's head. Blocks of messages are left out."""
    pieces, ends, block_of = [], [], []
    shown = []
    for block in blocks:
        if not block.in_head:
            break
        begin = block.end - len(block.text)
        shown.append((block.label, block.part, begin))
        at = begin
        for line in block.text.splitlines(True):
            for start in range(0, len(line), PIECE_BYTES):
                piece = line[start : start + PIECE_BYTES]
                at += len(piece)
                pieces.append(hash(piece))
                ends.append(at)
                block_of.append(len(shown) - 1)
    return Sketch(tuple(pieces), tuple(ends), tuple(block_of), tuple(shown))


def shared_bytes(one: Sketch, other: Sketch) -> int:
    """How many bytes both heads begin with, right to a piece."""
    count = common_prefix(one.pieces, other.pieces)
    return one.ends[count - 1] if count else 0


def place_of(old: Sketch, new: Sketch) -> Place | None:
    """Where `new` diverges from `old`; None if one begins with all of the other, or if it is
    another agent's head: less than half of the smaller one is in both."""
    count = common_prefix(old.pieces, new.pieces)
    if count in (len(old.pieces), len(new.pieces)):
        return None
    sizes = [end - begin for begin, end in zip((0, *new.ends), new.ends, strict=False)]
    left = Counter(old.pieces[count:])
    lost = 0
    for piece, size in zip(new.pieces[count:], sizes[count:], strict=True):
        if left[piece] > 0:
            left[piece] -= 1
            lost += size
    at_bytes = new.ends[count - 1] if count else 0
    smaller = min(old.ends[-1], new.ends[-1])
    if 2 * (at_bytes + lost) < smaller or not lost:
        return None
    label, part, begin = new.blocks[new.block_of[count]]
    return Place(label, part, max(at_bytes - begin, 0), at_bytes, lost)


class Found(NamedTuple):
    """A divergence. kind: a key of `report.MEANINGS`. bytes: how many are known to differ.
    earlier_version: of the client that sent the earlier prompt."""

    scope: str
    kind: str
    place: Place
    bytes: int
    earlier_version: str = ""


@dataclass(slots=True)
class _Version:
    """What the heads of one version of a client in a group have in common.

    alike: how many bytes all of them begin with. heads: how many were seen.
    """

    first: Sketch
    alike: int
    heads: int = 1
    is_reported: bool = False
    moves: bool = False


@dataclass(slots=True)
class _Group:
    """latest: the head of the latest prompt whose head was new. versions: the latest ones last."""

    latest: Sketch
    versions: OrderedDict[str, _Version] = field(default_factory=OrderedDict)


_Turn = tuple[Chain, int]
"""A conversation's last prompt, and the last hash of the one that it continues. A plain tuple: one
is made for each request."""


class Heads:
    """Bounded by bytes and by number; the least recent is dropped first."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._turns: dict[Hashable, _Turn] = {}
        self._sketches: OrderedDict[int, Sketch] = OrderedDict()
        self._groups: OrderedDict[Hashable, _Group] = OrderedDict()

    def is_usual(self, conversation: Hashable, chain: Chain) -> bool:
        """Whether a prompt continues its conversation, or begins one with a head that is known.
        Then it is remembered, and there is nothing to find. Nearly every request comes here."""
        hashes, old = chain.hashes, self._turns.get(conversation)
        if old is None:
            return self._begins(conversation, chain)
        last = old[0].hashes
        if not last:
            return self._begins(conversation, chain)
        end, count = len(last), len(hashes)
        if end > count or hashes[end - 1] != last[-1]:
            return False
        # In its place: moving it to the end would cost as much as all else.
        self._turns[conversation] = chain, last[-1]
        self.size_bytes += _SEGMENT_BYTES * (count - end)
        if self.size_bytes > LIMIT_BYTES:
            self._shrink()
        return True

    def _begins(self, conversation: Hashable, chain: Chain) -> bool:
        if not chain.hashes:
            return True
        if (head := _head_of(chain)) and head not in self._sketches:
            return False
        self._keep(conversation, chain, 0)
        return True

    def find(
        self,
        conversation: Hashable,
        group: Hashable,
        chain: Chain,
        version: str,
        read: Callable[[], Sequence[Block]],
        *,
        is_compacted: bool = False,
    ) -> Found | None:
        """Where a prompt that is not usual diverges. Remembers it.

        group: prompts of a group should begin alike. read: the blocks of the prompt.
        """
        blocks = read()
        head = _head_of(chain)
        old = self._turns.get(conversation)
        found = of_version = None
        if head and (new := self._sketches.get(head)) is None:
            new = self._sketch(head, blocks)
            before = None if old is None else self._sketches.get(_head_of(old[0]))
            of_version, found = self._compare(group, version, new, before, blocks)
        if found is None and old is not None and _head_of(old[0]) == head:
            found = _in_messages(old, chain, blocks, is_compacted=is_compacted)
        self._keep(conversation, chain, 0 if old is None else old[0].hashes[-1])
        return of_version or found

    def _compare(
        self,
        group: Hashable,
        version: str,
        new: Sketch,
        before: Sketch | None,
        blocks: Sequence[Block],
    ) -> tuple[Found | None, Found | None]:
        """What a new version changes, and where the head diverges otherwise."""
        known = self._groups.get(group)
        if known is None:
            known = self._groups[group] = _Group(new)
            if len(self._groups) > _MOST_GROUPS:
                self._groups.popitem(last=False)
        else:
            self._groups.move_to_end(group)
        of_version = _watch(known, version, new, blocks) if version else None
        scope, old = (FLEET, known.latest) if before is None else (SESSION, before)
        known.latest = new
        place = place_of(old, new)
        if place is None:
            return of_version, None
        kind = kind_at(blocks, place.at_bytes)
        return of_version, Found(scope, kind, place, PIECE_BYTES)

    def _sketch(self, head: int, blocks: Sequence[Block]) -> Sketch:
        made = self._sketches[head] = sketch_of(blocks)
        self.size_bytes += made.size_bytes
        self._shrink()
        return made

    def _keep(self, conversation: Hashable, chain: Chain, before: int) -> None:
        if conversation is None:
            return
        if (old := self._turns.pop(conversation, None)) is not None:
            self.size_bytes -= _SEGMENT_BYTES * len(old[0].hashes)
        self._turns[conversation] = chain, before
        self.size_bytes += _SEGMENT_BYTES * len(chain.hashes)
        self._shrink()

    def _shrink(self) -> None:
        """Drops the oldest until the bounds hold: conversations first, as heads are few."""
        turns, sketches = self._turns, self._sketches
        while len(turns) > 1 and (
            self.size_bytes > LIMIT_BYTES or len(turns) > _MOST_CONVERSATIONS
        ):
            oldest = next(iter(turns))
            self.size_bytes -= _SEGMENT_BYTES * len(turns.pop(oldest)[0].hashes)
        while len(sketches) > 1 and (self.size_bytes > LIMIT_BYTES or len(sketches) > _MOST_HEADS):
            self.size_bytes -= sketches.popitem(last=False)[1].size_bytes


def _head_of(chain: Chain) -> int:
    """The hash of a prompt's tools and instructions; 0 without any."""
    count = chain.head_segments
    return chain.hashes[count - 1] if count else 0


def _watch(group: _Group, version: str, new: Sketch, blocks: Sequence[Block]) -> Found | None:
    """What a version changes against the one before it, within its first heads; each once."""
    known = group.versions.get(version)
    if known is None:
        known = group.versions[version] = _Version(new, new.ends[-1] if new.ends else 0)
        if len(group.versions) > _MOST_VERSIONS:
            group.versions.popitem(last=False)
    else:
        known.heads += 1
        known.alike = min(known.alike, shared_bytes(known.first, new))
    earlier = [name for name in group.versions if name != version]
    if not earlier or known.heads > _WATCHED or next(reversed(group.versions)) != version:
        return None
    before = group.versions[earlier[-1]]
    if known.heads > 1 and not known.moves and before.alike - known.alike >= _MIN_LOST_BYTES:
        known.moves = True
        place = _place(known.first, known.alike, before.alike)
        return Found(VERSION, kind_at(blocks, place.at_bytes), place, PIECE_BYTES, earlier[-1])
    alike = shared_bytes(before.first, new)
    if not known.is_reported and known.heads == 1 and before.alike - alike >= _MIN_LOST_BYTES:
        known.is_reported = True
        place = _place(new, alike, before.alike)
        return Found(VERSION, NEW_VERSION, place, PIECE_BYTES, earlier[-1])
    return None


def _place(sketch: Sketch, alike: int, before: int) -> Place:
    """The place after so many bytes that are alike; before it was after so many."""
    number = next((at for at, end in enumerate(sketch.ends) if end > alike), len(sketch.ends) - 1)
    label, part, begin = sketch.blocks[sketch.block_of[number]]
    return Place(label, part, max(alike - begin, 0), alike, before - alike)


def _in_messages(
    old: _Turn, chain: Chain, blocks: Sequence[Block], *, is_compacted: bool
) -> Found | None:
    """Where messages diverge from those of the conversation's last prompt. What follows is counted
    as lost, as the hashes of both differ from there on."""
    earlier, before = old
    count = common_prefix(earlier.hashes, chain.hashes)
    if count == len(chain.hashes) or (before and before in chain.hashes):
        return None  # it was sent again, or another turn follows the prompt before
    at_bytes = chain.ends[count - 1] if count else 0
    rest, old_rest = chain.ends[-1] - at_bytes, earlier.ends[-1] - at_bytes
    kind = "truncated" if 2 * rest < old_rest else "rewritten"
    if is_compacted:
        kind = COMPACTION
    block = next((each for each in blocks if each.end > at_bytes), None)
    if block is None:
        return None
    byte = max(at_bytes - (block.end - len(block.text)), 0)
    part = block.part if block.part == SYSTEM and block.in_head else "messages"
    place = Place(block.label, part, byte, at_bytes, min(rest, old_rest))
    return Found(SESSION, kind, place, PIECE_BYTES)
