"""Writes the commit of a checkout into the wheels and source archives that are built from it."""

import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface):  # type: ignore[type-arg]
    """An editable install asks git itself. A wheel from a source archive takes the archive's."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if version == "editable" or not (root / ".git").exists():
            return
        ours = runpy.run_path(str(root / "sgl_ext/version.py"))
        self._folder = tempfile.TemporaryDirectory()
        file = Path(self._folder.name, ours["COMMIT_FILE"])
        file.write_text(ours["commit_of"](root) or "", encoding="utf-8")
        build_data["force_include"][str(file)] = f"sgl_ext/{file.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()
