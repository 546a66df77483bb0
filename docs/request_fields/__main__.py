"""Writes docs/reference/request-fields.md: `python -m docs.request_fields [PYTHON]`.

PYTHON is an interpreter that has a newer OpenAI SDK than SGLang's own.
"""

import asyncio
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from docs.request_fields import sdks
from docs.request_fields.observed import Observer
from docs.request_fields.states import (
    ACTS,
    COUNTED,
    ELSEWHERE,
    HARMLESS,
    REFUSED,
    UNKNOWN,
    Notes,
    State,
    states_of,
)
from sgl_ext.engine.fields.ranges import GENERATION, SAMPLING, Elsewhere, Internal

PAGE = Path(__file__).parents[1] / "reference" / "request-fields.md"
_ROOT = "request"
_HEAD = """# Request fields

What becomes of each field that the vendors' SDKs can send, from requests with and without it.
A field that is not listed is acted on. Objects have the names of the SDKs' types, without `Beta`,
`Param` and dates; those that are [translated](../guide/clients.md#what-is-translated) are not
listed.

| | meaning |
|---|---|
| acted on | with it, the model, its sampler or the cache gets something else than without it |
| balancer | the balancer acts on it, and an engine does not see it |
| counted | translated or left out, [by this name](../guide/clients.md#what-is-translated) |
| refused | an error with status 400, which names the field |
| harmless | nothing acts on it, and the answer means the same |
"""
_HINTS = (Path(__file__).parent / "hints.txt").read_text()
_AS_USUAL = (ACTS, COUNTED)
_SHOWN = {ELSEWHERE: "balancer", COUNTED: "counted", REFUSED: "refused"}
_ABOUT_TYPES = re.compile(r"^Beta|_?20\d{6}|(Param)+$")


def read_schemas(openai_python: str | None = None) -> dict[str, dict[str, Any]]:
    """Version and schemas of both SDKs."""
    anthropic = sdks.read_sdk("anthropic")
    if openai_python is None:
        return {"anthropic": anthropic, "openai": sdks.read_sdk("openai")}
    command = [openai_python, sdks.__file__, "openai"]
    shown = subprocess.run(command, capture_output=True, check=True)
    return {"anthropic": anthropic, "openai": json.loads(shown.stdout)}


async def page(found: dict[str, dict[str, Any]]) -> str:
    """The page's text."""
    observer, parts = Observer(), [_HEAD, _HINTS]
    for sdk, about in found.items():
        for path, document in about["schemas"].items():
            states = await states_of(observer, path, document, Notes(path))
            parts.append(f"\n## {path}, by {sdk} {about['version']}\n")
            parts += _lists(states)
    parts += await _completions(observer)
    parts += _generate()
    return "\n".join(parts) + "\n"


async def _completions(observer: Observer) -> list[str]:
    """The section of an API that OpenAI changes no more, so that SGLang's own SDK will do."""
    about = sdks.read_sdk("openai", (sdks.COMPLETIONS,))
    states = await states_of(
        observer, sdks.COMPLETIONS, about["schemas"][sdks.COMPLETIONS], Notes(sdks.COMPLETIONS)
    )
    return [f"\n## {sdks.COMPLETIONS}, by openai {about['version']}\n", *_lists(states)]


def _generate() -> Iterator[str]:
    """The section of SGLang's own path, whose fields are those of its requests."""
    yield "\n## /generate, by SGLang's own classes\n"
    yield "The fields of the [ranges](limits.md#ranges-of-fields) are acted on, but for these:\n"
    for prefix, table in (("", GENERATION), ("sampling_params.", SAMPLING)):
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name, check in table.items():
            state, why = (REFUSED, "") if isinstance(check, Internal) else (ACTS, "")
            if isinstance(check, Elsewhere) and "read" in str(check):
                state, why = HARMLESS, str(check)
            groups[state, why].append(prefix + name)
        for (state, why), names in groups.items():
            if state != ACTS:
                yield f"- {_names(names)}: {_became(state, why)}"


def _lists(states: list[State]) -> Iterator[str]:
    own = [state for state in states if state.object == _ROOT and state.state != ACTS]
    for (state, text), group in _groups(own, lambda each: (each.state, _text(each))):
        yield f"- {_names(each.field for each in group)}: {_became(state, text)}"
    yield "\nFields of objects:\n"
    others = [each for each in states if each.object != _ROOT and each.state not in _AS_USUAL]
    for (state, text), group in _groups(others, lambda each: (each.state, _text(each))):
        rows = [
            f"{name}: {_names(dict.fromkeys(each.field for each in of_one))}"
            for name, of_one in _groups(group, lambda each: _short(each.object))
        ]
        if state == HARMLESS:
            rows = [_names(dict.fromkeys(each.field for each in group))]
        yield f"- {'; '.join(rows)}: {_became(state, text)}"


def _became(state: str, text: str) -> str:
    return ": ".join(part for part in (_SHOWN.get(state, state), text) if part)


def _groups(states: Iterable[State], key: Any) -> list[tuple[Any, list[State]]]:
    groups = defaultdict(list)
    for state in states:
        groups[key(state)].append(state)
    return sorted(groups.items(), key=lambda group: _rank(group[1][0]))


def _rank(state: State) -> tuple[int, str]:
    order = (ACTS, ELSEWHERE, COUNTED, REFUSED, HARMLESS, UNKNOWN)
    return order.index(state.state), state.text


def _text(state: State) -> str:
    """What a line says of its state. Errors are SGLang's or ours, and each is in its own words."""
    if state.state == COUNTED:
        return "by its own name" if state.text == state.field else f"`{state.text}`"
    return state.text if state.state in (ELSEWHERE, HARMLESS) else ""


def _short(name: str) -> str:
    return _ABOUT_TYPES.sub("", name.rpartition("__")[2])


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(asyncio.run(page(read_schemas(*sys.argv[1:2]))))
