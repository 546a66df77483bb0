"""The patches for SGLang in docs/upstream apply to the version that is installed."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

PATCHES = sorted((Path(__file__).parents[1] / "docs" / "upstream").glob("*.patch"))
_CHANGED = "+++ b/python/sglang/"


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_a_patch_applies_and_leaves_valid_code(patch: Path, tmp_path: Path) -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    lines = patch.read_text().splitlines()
    changed = [line.removeprefix(_CHANGED) for line in lines if line.startswith(_CHANGED)]
    assert changed
    for name in changed:
        copy = tmp_path / "python" / "sglang" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(spec.origin).parent / name, copy)
    subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, check=True)
    for name in changed:
        code = (tmp_path / "python" / "sglang" / name).read_text()
        compile(code, name, "exec")
        assert code != (Path(spec.origin).parent / name).read_text()
