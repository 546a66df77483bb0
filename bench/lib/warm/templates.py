"""How long chat templates of real models' structure take to render a long chat.

SGLang renders the whole chat in each turn, in Jinja's sandbox. Ours does, too, with quicker code
(`sgl_ext/engine/host_cache/chat_templates.py`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from inspect import unwrap
from pathlib import Path
from typing import Any

import sgl_ext_cpu
from transformers.utils import chat_template_utils

from sgl_ext.engine.host_cache.chat_templates import compile_template

_FOLDER = Path(sgl_ext_cpu.__file__).parent
_MESSAGES = 400


def template_sources() -> dict[str, str]:
    """The templates by name: the CPU models' own, and those of other models' structure."""
    files = [_FOLDER / "chat.jinja", *sorted((_FOLDER / "templates").glob("*.jinja"))]
    return {file.stem: file.read_text() for file in files}


def template_times(rounds: int) -> dict[str, dict[str, Any]]:
    """For each template, milliseconds of CPU time by arm, and the ratio with its range."""
    return {name: times_of(source, rounds) for name, source in template_sources().items()}


def compiled(source: str, *, quick: bool) -> Any:
    """A template, compiled as SGLang does it or with our look-ups."""
    compile_whole = unwrap(chat_template_utils._cached_compile_jinja_template)
    return compile_template(compile_whole, source) if quick else compile_whole(source)


def chat(messages: int) -> Mapping[str, Any]:
    """What a template is given for an agent's chat: calls with results, now and then an answer."""
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": "You edit files. " * 100},
        {"role": "user", "content": "Please tidy up this project."},
    ]
    for number in range(messages):
        call = {"name": "Tool3", "arguments": {"path": f"src/module_{number}.py"}}
        called = [{"id": f"call_{number}", "type": "function", "function": call}]
        turns.append({"role": "assistant", "content": "The next file.", "tool_calls": called})
        result = {
            "role": "tool",
            "tool_call_id": f"call_{number}",
            "content": "def f(): pass\n" * 90,
        }
        turns.append(result)
        if number % 10 == 9:
            turns.append({"role": "assistant", "content": "Done."})
            turns.append({"role": "user", "content": "Go on."})
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    functions = [
        {"name": f"Tool{n}", "description": "Edits a file", "parameters": schema} for n in range(20)
    ]
    return {
        "messages": turns[:messages],
        "tools": [{"type": "function", "function": function} for function in functions],
        "documents": None,
        "add_generation_prompt": True,
        "enable_thinking": False,
    }


def times_of(source: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of CPU time of both arms, in turn. Raises RuntimeError if they differ."""
    asked = chat(_MESSAGES)
    arms = {"stock": compiled(source, quick=False), "ours": compiled(source, quick=True)}
    if len({template.render(asked) for template in arms.values()}) != 1:
        raise RuntimeError("the two ways to render a template differ")
    seen: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(rounds):
        for arm, template in arms.items():
            begin = time.process_time()
            template.render(asked)
            seen[arm].append((time.process_time() - begin) * 1e3)
    ratios = [stock / ours for stock, ours in zip(seen["stock"], seen["ours"], strict=True)]
    return {
        **{f"{arm}_ms": round(statistics.median(times), 2) for arm, times in seen.items()},
        "ratio": round(statistics.median(ratios), 2),
        "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
    }
