"""Notes of where segments of prompts end in the shared tier, by which an engine publishes it.

    FOLDER/kv-1f2e/PAGE            keys and values of one page of tokens
    FOLDER/kv-1f2e.notes/SEGMENT   the segment's parent, its tokens, and the page in which it ends

Each engine writes notes of the prompts that it stores. A note is a page like others: no process
sees a part of one, it has a checksum, it counts against the budget, and it is evicted when the page
that it names was not used for long. A segment is in the tier while that page is there, because of
one prefix the tier evicts the end before the beginning.

One engine of a machine publishes for all: the one that has locked FOLDER/kv-1f2e.lock. The kernel
unlocks it when that process ends, however it ends, and another engine goes on.
"""

import fcntl
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from radix.residency_changes import Stored
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.tiers.page_folder import PageFolder, Read, Written

MOST_NOTES = 200_000
"""Further notes are neither read nor published."""
_MOST_WAITING = 1000  # prompts
_BYTES = 128
_NOTES = ".notes"
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(tuple[str | None, int, str])


class _Prompt(NamedTuple):
    segments: Sequence[Stored]
    pages: Sequence[str]


class NoteWriter:
    """Writes the notes of one engine. Prompts are added in one thread and written in others.

    space: the name space of the pages. page_tokens: how many tokens each has.
    """

    def __init__(self, folder: PageFolder, space: str, page_tokens: int) -> None:
        self._notes = folder.name_space(space + _NOTES)
        self._page_tokens = page_tokens
        self._waiting: deque[_Prompt] = deque()

    def add(self, segments: Sequence[Stored], pages: Sequence[str]) -> None:
        """Takes the segments of a prompt, to be written later. pages: of the same prompt, from its
        first one on."""
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(_Prompt(segments, pages))
        else:
            _count_dropped(len(segments))

    def write(self, used_ns: int) -> None:
        """Writes what was added."""
        while self._waiting:
            try:
                prompt = self._waiting.popleft()
            except IndexError:  # another thread took it
                return
            for segment, parent, tokens in prompt.segments:
                last = max(0, tokens // self._page_tokens - 1)
                if last < len(prompt.pages):
                    above = None if parent is None else f"{parent:032x}"
                    note = _ENCODER.encode((above, tokens, prompt.pages[last])).ljust(_BYTES)
                    result = self._notes.put(f"{segment:032x}", [memoryview(note)], used_ns)
                    if result not in (Written.WRITTEN, Written.KNOWN):
                        _count_dropped(1)

    def clear(self) -> None:
        """Removes the notes of all engines."""
        self._notes.clear()

    def close(self) -> None:
        self._notes.close()


@dataclass(slots=True)
class _Note:
    stored: Stored
    page: str
    used_ns: int = 0


class NoteReader:
    """Reads the notes of all engines. pages: the path of the name space of the pages."""

    def __init__(self, pages: Path) -> None:
        self._folder = PageFolder(pages.parent, budget_bytes=0)  # it writes none
        self._pages = self._folder.name_space(pages.name)
        self._notes = self._folder.name_space(pages.name + _NOTES)
        lock = pages.with_name(pages.name + ".lock")
        self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        self._known: dict[str, _Note] = {}

    def may_publish(self) -> bool:
        """Whether this reader's engine publishes for all, which it then does until it ends."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def segments(self) -> dict[int, Stored]:
        """The segments that the tier holds. A note counts as used when its page was used."""
        names = self._notes.names(MOST_NOTES)
        for gone in self._known.keys() - names:
            del self._known[gone]
        for name in names - self._known.keys():
            self._read(name)
        there = {}
        for name, note in self._known.items():
            if (used_ns := self._pages.used_ns(note.page)) is not None:
                there[note.stored[0]] = note.stored
                if used_ns != note.used_ns and self._notes.touch(name, used_ns):
                    note.used_ns = used_ns
        return there

    def close(self) -> None:
        """Lets another engine publish."""
        os.close(self._lock)
        for each in (self._pages, self._notes, self._folder):
            each.close()

    def _read(self, name: str) -> None:
        """Reads a note. One that is damaged is removed and counted, as any page is."""
        raw = bytearray(_BYTES)
        found = self._notes.get(name, [memoryview(raw)], used_ns=0)
        if found is Read.READ:
            try:
                above, tokens, page = _DECODER.decode(raw)
                parent = None if above is None else int(above, 16)
                self._known[name] = _Note((int(name, 16), parent, tokens), page)
                return
            except ValueError:  # msgspec's errors are some, too
                self._notes.drop(name)
                found = Read.CORRUPT
        if found is Read.CORRUPT:
            counter("shared_tier_pages").labels(found.value).inc()


def _count_dropped(segments: int) -> None:
    counter("shared_tier_notes_dropped").inc(segments)
