"""`sgl-ext doctor --template`: what the chat template of a model does, without an engine."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from sgl_ext.cli.node import NodeError, UsageError
from sgl_ext.cli.show import print_json, print_record

_MODULE = "sgl_ext.engine.http.template_folder"


def show_template(folder: Path, *, as_json: bool) -> None:
    """Prints it. Raises UsageError and NodeError."""
    if not folder.is_dir():
        raise UsageError(f"doctor: --template={str(folder)!r}: is no folder")
    if find_spec("sglang") is None:
        raise UsageError("doctor: --template needs SGLang: pip install 'sgl-ext[engine]'")
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", _MODULE, str(folder)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or ["it ended without a word"]
        raise NodeError(f"doctor: {lines[-1]}")
    facts = json.loads(ended.stdout)
    print_json(facts) if as_json else print_record(facts)
