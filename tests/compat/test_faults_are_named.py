"""Each repair of SGLang says which fault it mends, what shows it, and when it can go."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from sgl_ext import compat
from sgl_ext.engine.hooks import groups

ROOT = Path(__file__).parents[2]
ROWS = ("fault", "hooks", "test", "upstream", "ends with")
# Parts of a repair, and a command.
PARTS = ("__init__", "template_fitting", "template_folder", "template_model")
FOLDER = Path(str(compat.__file__)).parent
FILES = [path for path in sorted(FOLDER.glob("*.py")) if path.stem not in PARTS]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_repair_names_its_fault_its_tests_and_its_patch(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    for row in ROWS:
        assert re.search(rf"^    {row} ", text, re.MULTILINE), row
    for name in re.findall(r'group "([^"]+)"', text):
        assert name in {group.name for group in groups()}
    for patch in re.findall(r"docs/upstream/[\w-]+\.patch", text):
        assert (ROOT / patch).exists()
    first, *others = re.findall(r"(?:tests/\w+/)*test_\w+\.py", text)
    folder = (ROOT / first).parent
    assert all((folder / name).exists() for name in (Path(first).name, *others))
