"""How the models of each family write an answer: thinking, a text, and calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

Arguments = Mapping[str, str | int]
Calls = list[tuple[str, Arguments]]
"""Names and arguments."""


@dataclass(frozen=True)
class Form:
    """What an answer looks like, up to the token that ends it.

    tool_parser, reasoning_parser: SGLang's names.
    calls: writes all calls of an answer.
    tags: around the thinking; a first one that ends the prompt is not written again.
    thinks_if: what the prompt has if the model thinks. off: what ends it if not; "": the last tag.
    thinks_in_loops: whether it can think and call tools.
    texts: around a text. texts_with_calls: around one beside calls.
    has_text_with_calls: whether there can be one.
    before_calls: between the thinking and calls, and between a text and calls.
    model_type: as in the model's configuration.
    numbered_by: what begins each call in a prompt, if a call's name has its number.
    """

    tool_parser: str
    reasoning_parser: str | None
    calls: Callable[[Calls], str]
    tags: tuple[str, str] = ("", "")
    thinks_if: str = ""
    texts: tuple[str, str] = ("", "")
    before_calls: tuple[str, str] = ("", "")
    model_type: str = "any"
    has_text_with_calls: bool = True
    texts_with_calls: tuple[str, str] | None = None
    numbered_by: str = ""
    off: str = ""
    thinks_in_loops: bool = True

    def write(self, prompt: str, thinking: str, text: str, calls: Calls) -> str:
        """An answer to a prompt. Without an opener, or with thinking off, there is no thinking."""
        opener, closer = self.tags
        is_opened = prompt.endswith(opener)
        is_off = not opener or (not is_opened and prompt.endswith(self.off or closer))
        if self.thinks_if == "opened":
            is_off |= not is_opened
        else:
            is_off |= self.thinks_if not in prompt
        written = ""
        if not is_off:
            written = ("" if is_opened else opener) + thinking + closer
        if text and (self.has_text_with_calls or not calls):
            before, after = (calls and self.texts_with_calls) or self.texts
            written += before + text + after
        if self.numbered_by:
            count = prompt.count(self.numbered_by)
            calls = [(f"{name}:{n}", given) for n, (name, given) in enumerate(calls, count)]
        if calls:
            return written + self.before_calls[bool(text)] + self.calls(calls)
        return written


def _json(arguments: Arguments) -> str:
    return json.dumps(arguments)


def _hermes(calls: Calls) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {_json(given)}}}\n</tool_call>'
        for name, given in calls
    )


def _parameters(calls: Calls) -> str:
    def one(name: str, given: Arguments) -> str:
        lines = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in given.items())
        return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _glm(calls: Calls) -> str:
    def one(name: str, given: Arguments) -> str:
        lines = "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in given.items()
        )
        return f"\n<tool_call>{name}\n{lines}</tool_call>"

    return "".join(one(*call) for call in calls)


def _minimax(calls: Calls) -> str:
    def one(name: str, given: Arguments) -> str:
        lines = "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in given.items())
        return f'<invoke name="{name}">\n{lines}</invoke>\n'

    return f"<minimax:tool_call>\n{''.join(one(*call) for call in calls)}</minimax:tool_call>"


def _kimi(calls: Calls) -> str:
    begin, middle, end = (f"<|tool_call_{n}|>" for n in ("begin", "argument_begin", "end"))
    written = "".join(
        f"{begin}functions.{name}{middle}{_json(given)}{end}" for name, given in calls
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def _deepseek(calls: Calls) -> str:
    written = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(given)}<｜tool▁call▁end｜>"
        for name, given in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def _dsml(calls: Calls) -> str:
    def one(name: str, given: Arguments) -> str:
        lines = "".join(
            f'<｜DSML｜parameter name="{k}" string="{str(isinstance(v, str)).lower()}">'
            f"{v}</｜DSML｜parameter>\n"
            for k, v in given.items()
        )
        return f'<｜DSML｜invoke name="{name}">\n{lines}</｜DSML｜invoke>\n'

    written = "".join(one(*call) for call in calls)
    return f"<｜DSML｜function_calls>\n{written}</｜DSML｜function_calls>"


def _llama(calls: Calls) -> str:
    return "; ".join(f'{{"name": "{n}", "parameters": {_json(given)}}}' for n, given in calls)


def _mistral(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(given)}" for name, given in calls)


def _harmony(calls: Calls) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{_json(given)}<|call|>"
        for n, given in calls
    )


def _gemma(calls: Calls) -> str:
    def one(name: str, given: Arguments) -> str:
        values = {k: f'<|"|>{v}<|"|>' if isinstance(v, str) else v for k, v in given.items()}
        inner = ",".join(f"{key}:{value}" for key, value in sorted(values.items()))
        return f"<|tool_call>call:{name}{{{inner}}}<tool_call|>"

    return "".join(one(*call) for call in calls)


_THINK = ("<think>\n", "\n</think>\n\n")
_QWEN35 = Form("qwen3_coder", "qwen3", _parameters, tags=_THINK, before_calls=("", "\n\n"))
_KIMI = Form("kimi_k2", None, _kimi, numbered_by="<|tool_call_begin|>")
FORMS: dict[str, Form] = {
    "qwen3": Form("qwen25", "qwen3", _hermes, tags=_THINK, before_calls=("", "\n")),
    "qwen35": _QWEN35,
    "qwen3_coder": replace(_QWEN35, reasoning_parser=None, tags=("", "")),
    "glm46": Form("glm45", "glm45", _glm, tags=("\n<think>", "</think>"), texts=("\n", "")),
    "minimax_m2": Form("minimax-m2", "minimax", _minimax, tags=_THINK, before_calls=("\n", "\n")),
    "kimi_k2": _KIMI,
    "kimi_k2_thinking": replace(_KIMI, reasoning_parser="kimi_k2", tags=("<think>", "</think>")),
    "deepseek_v31": Form(
        "deepseekv31",
        "deepseek-v3",
        _deepseek,
        tags=("<think>", "</think>"),
        thinks_if="opened",
        thinks_in_loops=False,
    ),
    "deepseek_v32": Form(
        "deepseekv32",
        "deepseek-v3",
        _dsml,
        tags=("<think>", "</think>"),
        thinks_if="opened",
        before_calls=("\n\n", "\n\n"),
    ),
    "llama33": Form("llama3", None, _llama, has_text_with_calls=False),
    "devstral": Form("mistral", None, _mistral),
    "harmony": Form(
        "gpt-oss",
        "gpt-oss",
        _harmony,
        tags=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        off="no thinking",
        texts=("<|channel|>final<|message|>", ""),
        texts_with_calls=("<|channel|>commentary<|message|>", "<|end|><|start|>assistant"),
        model_type="gpt_oss",
    ),
    "gemma4": Form(
        "gemma4",
        "gemma4",
        _gemma,
        tags=("<|channel>thought\n", "\n<channel|>"),
        thinks_if="<|think|>",
        model_type="gemma4",
    ),
}
_NAMES = {
    "qwen3.5": "qwen35",
    "qwen3-coder": "qwen3_coder",
    "qwen3": "qwen3",
    "glm-4.6": "glm46",
    "minimax-m2": "minimax_m2",
    "kimi-k2-thinking": "kimi_k2_thinking",
    "kimi-k2": "kimi_k2",
    "deepseek-v3.1": "deepseek_v31",
    "meta-llama-llama-3": "llama33",
    "llama-3.3": "llama33",
    "devstral": "devstral",
    "gpt-oss": "harmony",
    "gemma-4": "gemma4",
}


def form_of(stem: str) -> Form | None:
    """The form of a template by its file's name: a family's here, or part of a model's name."""
    if stem in FORMS:
        return FORMS[stem]
    found = (family for name, family in _NAMES.items() if name in stem.lower())
    return FORMS.get(next(found, ""))
