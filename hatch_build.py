"""Adds to what is built what is not a module of a checkout: its commit, recipes and documents."""

import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """An editable install needs neither: it asks git, and reads `launch/` itself."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        self._add_commit(build_data["force_include"])
        if self.target_name == "wheel":
            self._add_recipes(build_data["force_include"])

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()

    def _add_commit(self, included: dict[str, str]) -> None:
        """A wheel from a source archive takes the archive's."""
        root = Path(self.root)
        if not (root / ".git").exists():
            return
        ours = runpy.run_path(str(root / "sgl_ext/version.py"))
        self._folder = tempfile.TemporaryDirectory()
        file = Path(self._folder.name, ours["COMMIT_FILE"])
        file.write_text(ours["commit_of"](root) or "", encoding="utf-8")
        included[str(file)] = f"sgl_ext/{file.name}"

    def _add_recipes(self, included: dict[str, str]) -> None:
        ours = runpy.run_path(str(Path(self.root, "sgl_ext/recipes.py")))
        for name, path in ours["of_checkout"](Path(self.root)).items():
            included[str(path)] = f"sgl_ext/recipe_files/{name}"
