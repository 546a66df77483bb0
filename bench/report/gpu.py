"""`make gpu-report`, as a step of the report: its document is the JSON object of the last line."""

from __future__ import annotations

import json
import subprocess
import sys

from sgl_ext_cpu.node import ROOT

_FOLDER = ROOT / ".run/gpu-report"
_SHOWN = ("name", "status", "seconds", "why")


def main() -> int:
    command = [sys.executable, "-m", "bench.gpu", "--folder", str(_FOLDER), "--minutes", "19"]
    status = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode
    report = json.loads((_FOLDER / "report.json").read_text())
    steps = [
        # The environment names paths of this machine.
        {name: step[name] for name in _SHOWN}
        | {"figures": {} if step["name"] == "environment" else step["figures"]}
        for step in report["steps"]
    ]
    print(json.dumps({"bench": "gpu", **report, "steps": steps}))
    return status


if __name__ == "__main__":
    sys.exit(main())
