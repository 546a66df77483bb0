"""What becomes of a conversation in each family's chat template, and of an answer in the next turn?

For each template SGLang's own HTTP front end, with our hooks, takes the conversations of
`bench/lib/templates/conversations.py` on /v1/chat/completions, /v1/messages and /v1/responses. A
script answers as a model of the family would; SGLang parses that, and the client echoes it. No
engine runs. Contexts are inserted as a balancer does it. By family:

    read_back_share  of the tokens of answers in loops of tools, those that the next prompt has
                     again, with all that was before them, by protocol; user_read_back_share: the
                     same where a user speaks next, when most templates leave thinking out;
                     streamed_read_back_share: the same of streamed answers
    lost, moved      texts of requests that are not in the prompt, or not in their order
    repeated         texts that are in the prompt more than once
    without_tools    conversations in which `tool_choice: "none"` leaves the tools out
    first_difference the end of what is read back of the first such answer, and what comes then
    refused          conversations that end with an error, and which
    template_ms      CPU time to render 400 messages, as SGLang does it and with our code

At the top is how many families have lost or moved texts, or are rendered slower with our code. The
templates are those of `launch/cpu/sgl_ext_cpu/templates`, and DeepSeek-V3.2's encoder; or those of
a folder (`--templates DIR`, of `*.jinja`) whose names say a family's model.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import sgl_ext_cpu
from jinja2 import TemplateError
from sgl_ext_cpu.tokenizer import train

from bench.lib.script import InvariantBroken, Size, parser_of, require, run
from bench.lib.templates.clients import CLIENTS
from bench.lib.templates.conversations import SCENARIOS, STREAMED, Seen, converse
from bench.lib.templates.forms import FORMS, Form, form_of
from bench.lib.templates.front_end import FrontEnd, prepare
from bench.lib.warm.templates import times_of

_OURS = Path(sgl_ext_cpu.__file__).parent / "templates"
_ENCODED = "deepseek_v32"
_VOCABULARY = 8_000
_SLOWER = 1.05
_ROUNDS: dict[Size, int] = {"full": 25, "quick": 7, "smallest": 1}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--templates", type=Path, help="a folder of templates of models")
    parser.add_argument("--only", nargs="+", help="the names of some of them")
    options = parser.parse_args()
    run("templates", partial(compare, options.templates, options.only, options.size))


def compare(folder: Path | None, only: list[str] | None, size: Size) -> dict[str, Any]:
    """All templates, those of the folder or our own."""
    files = sorted((folder or _OURS).glob("*.jinja"))
    require(bool(files), "the folder has templates", folder=folder or _OURS)
    sources: dict[str, tuple[str | None, Form]] = {}
    for file in files:
        if form := form_of(file.stem):
            sources[file.stem] = file.read_text(), form
        else:
            print(f"{file.stem}: of no known family", file=sys.stderr)
    require(bool(sources), "a template's name says a family", folder=folder or _OURS)
    if folder is None:
        sources[_ENCODED] = None, FORMS[_ENCODED]
    if size == "smallest" and folder is None:
        only = only or ["qwen3", "minimax_m2"]
    if only:
        missing = [name for name in only if name not in sources]
        require(not missing, "there is a template of each name", missing=missing)
        sources = {name: sources[name] for name in only}
    prepare()
    vocabulary = train(_VOCABULARY)
    families = {}
    for name, (source, form) in sources.items():
        one = families[name] = figures_of(FrontEnd(source, form, vocabulary), form)
        # A folder's templates may refuse all.
        has_answers = folder is not None or any(one["read_back_share"].values())
        require(has_answers, "answers are parsed", template=name, errors=one["refused"])
        one["template_ms"] = None if source is None else _template_ms(source, size)
        print(name, one, file=sys.stderr, flush=True)
    return report(families)


def figures_of(front_end: FrontEnd, form: Form) -> dict[str, Any]:
    """One family, on all protocols."""
    seen = {name: Seen() for name in CLIENTS if front_end.has_responses or name != "responses"}
    for protocol, one in seen.items():
        for scenario in SCENARIOS:
            converse(front_end, form, protocol, scenario, one)
    streamed = {name: Seen() for name in seen}
    for protocol, one in streamed.items():
        for scenario in STREAMED:
            converse(front_end, form, protocol, scenario, one, streams=True)
    shares = {name: one.read_back_share for name, one in seen.items()}
    streamed_shares = {name: one.read_back_share for name, one in streamed.items()}
    seen |= {f"{name}, streamed": one for name, one in streamed.items()}
    errors = {name: error for one in seen.values() for name, error in one.refused.items()}
    return {
        "read_back_share": shares,
        "streamed_read_back_share": streamed_shares,
        "user_read_back_share": {name: seen[name].user_read_back_share for name in shares},
        **{
            what: sorted(text for one in seen.values() for text in getattr(one, what))
            for what in ("lost", "moved", "repeated", "without_tools")
        },
        "first_difference": {n: one.difference for n, one in seen.items() if one.difference},
        "refused": errors,
    }


def report(families: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """All figures, with those that should be 0 first."""
    timed = [one["template_ms"] for one in families.values() if one["template_ms"]]
    return {
        **{what: sum(bool(one[what]) for one in families.values()) for what in ("lost", "moved")},
        "slower": sum(one["ours_ms"] > one["stock_ms"] * _SLOWER for one in timed),
        **{
            what: sum(bool(one[what]) for one in families.values())
            for what in ("repeated", "refused")
        },
        "families": families,
    }


def _template_ms(source: str, size: Size) -> dict[str, Any] | None:
    try:
        return times_of(source, _ROUNDS[size])
    except (TemplateError, TypeError):  # the template refuses this chat
        return None
    except RuntimeError as error:
        raise InvariantBroken(str(error)) from None


if __name__ == "__main__":
    main()
