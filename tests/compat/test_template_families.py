"""Templates with the structure of families that people serve, and the model of each.

The facts are those of the families' own templates.
"""

from __future__ import annotations

import copy
import json
from inspect import unwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sgl_ext_cpu

from sgl_ext.compat.template_model import ROLES, Lists, Place, Render, Tools, observe

FOLDER = Path(sgl_ext_cpu.__file__).parent / "templates"
IN_PLACE, LOST, REFUSED, HEAD = Place.IN_PLACE, Place.LOST, Place.REFUSED, Place.HEAD
W, P, L, N, R = Lists.WHOLE, Lists.PRINTED, Lists.LOST, Lists.PARTLY, Lists.REFUSED


class Facts(NamedTuple):
    """first: the place of a first developer message; later: of a system and a developer message
    between turns; lists: by role in the order of ROLES; thinking: its place in a loop of tools;
    others: which facts differ from those of most families."""

    first: Place
    later: tuple[Place, Place]
    lists: tuple[Lists, ...]
    tools: Tools
    thinking: Place = LOST
    others: frozenset[str] = frozenset()


USUAL = {
    "has_text_with_calls": True,
    "has_parallel_calls": True,
    "has_call_ids": False,
    "grows_by_turns": True,
    "grows_in_loops": True,
}
ONE_CALL = frozenset({"has_text_with_calls", "has_parallel_calls"})
NO_TEXT = frozenset({"has_text_with_calls"})
WITH_IDS = frozenset({"has_call_ids"})
CALL_ALONE = frozenset({"has_text_with_calls", "has_parallel_calls", "grows_in_loops"})
ANYWHERE, NOWHERE = (IN_PLACE, IN_PLACE), (LOST, LOST)
BEHIND, FIRST = Tools.AFTER_SYSTEM, Tools.FIRST
FAMILIES = {
    "qwen3": Facts(LOST, (IN_PLACE, LOST), (R, L, R, R, P), BEHIND, IN_PLACE),
    "qwen35": Facts(REFUSED, (REFUSED, REFUSED), (W, R, W, W, W), FIRST, IN_PLACE),
    "qwen3_coder": Facts(IN_PLACE, ANYWHERE, (R, R, R, R, P), BEHIND),
    "glm46": Facts(LOST, (IN_PLACE, LOST), (W, L, W, W, P), FIRST, IN_PLACE),
    "minimax_m2": Facts(LOST, NOWHERE, (W, L, W, W, W), BEHIND, IN_PLACE),
    "kimi_k2": Facts(IN_PLACE, ANYWHERE, (W, W, W, W, W), FIRST, LOST, WITH_IDS),
    "kimi_k2_thinking": Facts(IN_PLACE, ANYWHERE, (W, W, W, W, W), FIRST, IN_PLACE, WITH_IDS),
    "deepseek_v31": Facts(LOST, (HEAD, LOST), (R, L, R, R, R), Tools.ABSENT),
    "llama33": Facts(IN_PLACE, ANYWHERE, (P, P, P, P, P), BEHIND, LOST, CALL_ALONE),
    "devstral": Facts(REFUSED, (IN_PLACE, REFUSED), (N, R, W, N, P), BEHIND),
    "harmony": Facts(IN_PLACE, NOWHERE, (P, P, R, R, P), BEHIND, LOST, ONE_CALL),
    "gemma4": Facts(IN_PLACE, ANYWHERE, (P, P, W, W, W), BEHIND, IN_PLACE, NO_TEXT),
}


def render_with(source: str) -> Render:
    """Renders as transformers does for SGLang."""
    from transformers.utils import chat_template_utils

    template = unwrap(chat_template_utils._cached_compile_jinja_template)(source)

    def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        given = copy.deepcopy(messages)
        for message in given:  # SGLang parses arguments
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return template.render(messages=given, tools=tools or None, add_generation_prompt=True)

    return render


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_does_with_a_conversation_what_its_own_template_does(family: str) -> None:
    facts = FAMILIES[family]
    model = observe(render_with((FOLDER / f"{family}.jinja").read_text()))
    assert model.first == {"system": IN_PLACE, "developer": facts.first}
    assert model.later == dict(zip(("system", "developer"), facts.later, strict=True))
    assert model.lists == dict(zip(ROLES, facts.lists, strict=True))
    assert model.tools == facts.tools
    assert (model.thinking, model.loop_thinking) == (LOST, facts.thinking)
    expected = {name: usual ^ (name in facts.others) for name, usual in USUAL.items()}
    assert {name: getattr(model, name) for name in USUAL} == expected


def test_every_template_has_facts() -> None:
    assert {file.stem for file in FOLDER.glob("*.jinja")} == FAMILIES.keys()
