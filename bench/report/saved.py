"""The file of a run: what was measured so far, so that an interrupted run goes on from there.

A run with other code, another machine or another size begins with nothing, unless it is to keep
what is there. Each step says at which commit, on which machine and with which command it was
measured.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.report.steps import Result

_LOGS = "log_end"


class Saved:
    """A run's document, written after each step.

    path: the file. key: what must be the same for an earlier run to go on.
    """

    def __init__(self, path: Path, key: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        self._path = path
        self._key = dict(key)
        self._facts = dict(facts)
        self._steps: dict[str, dict[str, Any]] = {}
        self._ended = False

    def go_on(self, *, keep: bool, also_ended: bool) -> str:
        """Takes over an earlier run's steps, if it may. Returns what it did, in a sentence.

        keep: whatever has changed. also_ended: if that run had reached its end, too.
        """
        try:
            earlier = json.loads(self._path.read_text())
            key, steps, ended = earlier["key"], earlier["steps"], earlier["ended"]
        except FileNotFoundError:
            return "There is no earlier run."
        except (ValueError, LookupError, TypeError):
            return "The earlier run's file cannot be read: this is a new run."
        changed = [name for name in self._key if key.get(name) != self._key[name]]
        if changed and not keep:
            return f"A new run, because of another {' and '.join(changed)} than in the earlier one."
        if ended and not (keep or also_ended):
            return "The earlier run had ended: this is a new one."
        self._steps = {step["name"]: step for step in steps}
        return f"Going on with {len(self._steps)} steps of the earlier run."

    def has(self, name: str) -> bool:
        """Whether a step was measured: again, it would say the same."""
        return self._steps.get(name, {}).get("status") in ("ok", "not valid")

    def add(self, result: Result, command: str, commit: str) -> None:
        """Adds a step, or replaces it, and writes the file."""
        began = {"command": command, "commit": commit, "measured": time.strftime("%Y-%m-%d")}
        self._steps[result.name] = {**result.document(), **began, "machine": self._facts["machine"]}
        self.write()

    def end(self) -> None:
        """Notes that the run came to its end."""
        self._ended = True
        self.write()

    def write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        document = {**self.document(logs=True), "key": self._key, "ended": self._ended}
        partly = self._path.with_suffix(".part")
        partly.write_text(json.dumps(document, indent=1) + "\n")
        partly.replace(self._path)

    def document(self, *, logs: bool = False) -> dict[str, Any]:
        """The facts and all steps. logs: with the ends of their logs."""
        steps = [
            {name: value for name, value in step.items() if logs or name != _LOGS}
            for step in self._steps.values()
        ]
        return {**self._facts, "steps": steps}
