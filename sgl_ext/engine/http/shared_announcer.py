"""Announces what the tier that engines share holds, once for all engines of the machine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from radix.residency.shared_segments import SharedSegments
from sgl_ext.engine.core.event_lines import stored_lines
from sgl_ext.engine.tiers.segment_notes import MOST_NOTES, NoteReader


class SharedAnnouncer:
    """One engine's part in it. pages: where the tier has the pages of this engine's model."""

    limit_segments = MOST_NOTES

    def __init__(self, pages: Path) -> None:
        self._notes = NoteReader(pages)
        self._announces = False
        self._segments = SharedSegments()

    def __len__(self) -> int:
        return len(self._segments)

    def step(self) -> list[dict[str, Any]]:
        """The lines that announce what changed since the last call; none while another engine
        announces. This reads files for a while: call it in a thread."""
        if not self._announces:
            if not self._notes.may_publish():
                return []
            self._announces = True
            # What another engine announced before it ended may be gone.
            return [{"shared_cleared": True}, *self._changes()]
        return list(self._changes())

    def _changes(self) -> Iterator[dict[str, Any]]:
        removed, stored = self._segments.update(self._notes.segments())
        if removed:
            yield {"shared_removed": [f"{segment:032x}" for segment in removed]}
        yield from stored_lines(stored, "shared")

    def close(self) -> None:
        """Lets another engine announce."""
        self._notes.close()
