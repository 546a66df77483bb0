"""What each driver does: two sessions of one tool loop, in a Python of the client's own.

Run as `python DRIVER.py VARIANT`, with the node in the environment. The last line of the output
is JSON: what each session answered, and the calls that it made, in order.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

URL, KEY, MODEL = (os.environ[f"NODE_{name}"] for name in ("URL", "KEY", "MODEL"))
PROMPTS: list[str] = json.loads(os.environ["NODE_PROMPTS"])
SYSTEM, RESULT = os.environ["NODE_SYSTEM"], os.environ["NODE_RESULT"]
VARIANT = sys.argv[1]
TOKENS = 400
CALLS: list[list[Any]] = []


def read_file(path: str) -> str:
    """Reads a file."""
    return _made("read_file", path=path)


def search(text: str) -> str:
    """Searches the project."""
    return _made("search", text=text)


def patch(input: str) -> str:
    """Changes files."""
    return _made("patch", input=input)


FUNCTIONS = {each.__name__: each for each in (read_file, search, patch)}
ARGUMENTS = {"read_file": "path", "search": "text", "patch": "input"}
SCHEMAS: dict[str, dict[str, Any]] = {
    name: {
        "type": "object",
        "properties": {argument: {"type": "string"}},
        "required": [argument],
        "additionalProperties": False,
    }
    for name, argument in ARGUMENTS.items()
}


def sessions(run: Any) -> None:
    """Runs `run(prompt, is_streamed)` for each prompt, the second one streamed."""
    told = []
    for prompt, is_streamed in zip(PROMPTS, (False, True), strict=True):
        CALLS.clear()
        answer = run(prompt, is_streamed)
        told.append({"answer": answer.strip(), "calls": list(CALLS)})
    print(json.dumps(told))


def _made(name: str, **arguments: str) -> str:
    CALLS.append([name, arguments])
    return RESULT
