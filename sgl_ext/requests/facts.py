"""What the stripped header said of its client, kept as hints for scheduling and caching."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClientFacts:
    """A coding agent's own words about a request. A fact it did not state is None or False."""

    version: str | None = None
    entrypoint: str | None = None
    workload: str | None = None
    is_subagent: bool = False

    @classmethod
    def from_fields(cls, fields: Mapping[str, str]) -> ClientFacts:
        """Reads a stripped header's fields, with or without Claude Code's `cc_` prefix."""

        def stated(name: str) -> str | None:
            return fields.get(f"cc_{name}", fields.get(name)) or None

        return cls(
            version=stated("version"),
            entrypoint=stated("entrypoint"),
            workload=stated("workload"),
            is_subagent=(stated("is_subagent") or "").lower() == "true",
        )
