"""What torch sees of the node's GPUs. A process of its own looks, because torch's import takes
seconds and would hold memory of each GPU.
"""

import json
import subprocess
import sys
from collections.abc import Mapping

from msgspec import Struct

LIMIT_S = 120.0

_QUESTION = """
import json, warnings
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    import torch
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps({
    "count": count,
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "hip": torch.version.hip,
    "warning": " ".join(str(one.message) for one in heard if "CUDA" in str(one.message)),
}))
"""


class Seen(Struct, frozen=True):
    """What torch says.

    cuda, hip: the versions that it is built for. warning: why it uses no GPU, as far as it says.
    problem: why it says nothing.
    """

    count: int = 0
    version: str = ""
    cuda: str | None = None
    hip: str | None = None
    warning: str = ""
    problem: str = ""

    @property
    def build(self) -> str:
        """Its version, and what it is built for."""
        kind = f"CUDA {self.cuda}" if self.cuda else f"ROCm {self.hip}" if self.hip else "no GPU"
        return f"torch {self.version}, built for {kind}"


def ask_torch(environ: Mapping[str, str], limit_s: float = LIMIT_S) -> Seen:
    """What torch sees of the GPUs that these variables leave visible."""
    command = [sys.executable, "-c", _QUESTION]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, env=dict(environ)
        )
    except subprocess.TimeoutExpired:
        return Seen(problem=f"torch found no GPU within {limit_s:g} s")
    if answer.returncode:
        last = (answer.stderr.strip().splitlines() or [f"status {answer.returncode}"])[-1]
        return Seen(problem=f"torch cannot be imported: {last}")
    return Seen(**json.loads(answer.stdout.splitlines()[-1]))
