"""Starts stock SGLang and our engine, and keeps them for the steps that can share them.

Once both serve it writes `--written`, a file for `--running` of `bench/lib/engines.py`. It ends
them when it is interrupted. Our scheduler writes what it made, for `bench/gpu/facts.py`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from bench.fanout import FLAGS
from bench.lib.arms import running_arms
from bench.lib.engines import chosen, engine_parser

FACTS = "facts.json"
"""Beside our engine's logs."""


def main() -> None:
    parser = engine_parser(__doc__)
    parser.add_argument("--written", type=Path, required=True)
    options = parser.parse_args()
    engines, folder = chosen(options, "tiny"), options.written.parent
    path = [str(Path(__file__).parent / "facts_probe"), os.environ.get("PYTHONPATH", "")]
    probe = {
        "SGLEXT_FACTS": str(folder / "ours" / FACTS),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }
    started = time.monotonic()
    starts = {
        "stock": partial(engines.stock, folder / "stock", *FLAGS),
        "ours": partial(engines.ours, folder / "ours", *FLAGS, environment=probe),
    }
    with suppress(KeyboardInterrupt), running_arms(starts) as nodes:
        start_s = round(time.monotonic() - started, 1)
        found = {
            name: {"url": node.url, "engines": node.engines, "log_dir": str(node.log_dir)}
            for name, node in nodes.items()
        }
        draft = options.written.with_suffix(".draft")
        draft.write_text(json.dumps(found | {"start_s": start_s}))
        draft.rename(options.written)
        threading.Event().wait()


if __name__ == "__main__":
    main()
