"""How each format writes a call of a tool with texts as arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

Arguments = Mapping[str, str]
BEGIN, END = "\u2581begin", "\u2581end"


def _json(name: str, given: Arguments) -> str:
    return json.dumps({"name": name, "arguments": given})


def _lines(name: str, given: Arguments) -> str:
    return f"<tool_call>\n{_json(name, given)}\n</tool_call>"


def _functions(name: str, given: Arguments) -> str:
    values = "".join(f"<parameter={key}>\n{each}\n</parameter>\n" for key, each in given.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def _mimo(name: str, given: Arguments) -> str:
    values = "".join(f"<parameter={key}>{each}</parameter>\n" for key, each in given.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def _values(name: str, given: Arguments) -> str:
    pairs = (
        f"<arg_key>{key}</arg_key>\n<arg_value>{each}</arg_value>\n" for key, each in given.items()
    )
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


def _pairs(name: str, given: Arguments) -> str:
    return _values(name, given).replace("</arg_key>\n", "</arg_key>")


def _hunyuan(name: str, given: Arguments) -> str:
    pairs = (
        f"<arg_key>{key}</arg_key>\n<arg_value>{each}</arg_value>\n" for key, each in given.items()
    )
    call = f"<tool_call>{name}<tool_sep>\n{''.join(pairs)}</tool_call>"
    return f"<tool_calls>\n{call}\n</tool_calls>"


def _mark(what: str, side: str) -> str:
    return f"<\uff5ctool\u2581{what}{side}\uff5c>"


def _deepseek_v3(name: str, given: Arguments) -> str:
    call = f"function{_mark('sep', '')}{name}\n```json\n{json.dumps(given)}\n```"
    one = f"{_mark('call', BEGIN)}{call}{_mark('call', END)}"
    return f"{_mark('calls', BEGIN)}{one}{_mark('calls', END)}"


def _deepseek_v31(name: str, given: Arguments) -> str:
    call = f"{name}{_mark('sep', '')}{json.dumps(given)}"
    one = f"{_mark('call', BEGIN)}{call}{_mark('call', END)}"
    return f"{_mark('calls', BEGIN)}{one}{_mark('calls', END)}"


def _dsml(calls: str, space: str = "") -> Callable[[str, Arguments], str]:
    tag = f"\uff5cDSML\uff5c{space}"

    def write(name: str, given: Arguments) -> str:
        values = "".join(
            f'<{tag}parameter name="{key}" string="true">{each}</{tag}parameter>\n'
            for key, each in given.items()
        )
        invoke = f'<{tag}invoke name="{name}">\n{values}</{tag}invoke>'
        return f"<{tag}{calls}>\n{invoke}\n</{tag}{calls}>"

    return write


def _gcml(name: str, given: Arguments) -> str:
    tag = "\uff5cGCML\uff5c"
    values = "".join(
        f'<{tag}parameter name="{key}" string="true">{each}</{tag}parameter>\n'
        for key, each in given.items()
    )
    invoke = f'<{tag}invoke name="{name}">\n{values}</{tag}invoke>'
    return f"<{tag}tool_calls>\n{invoke}\n</{tag}tool_calls>"


def _invoke(name: str, given: Arguments, space: str = "") -> str:
    values = "".join(
        f'{space}<parameter name="{key}">{each}{space}</parameter>\n' for key, each in given.items()
    )
    return f'<invoke name="{name}">\n{values}</invoke>'


def _minimax_m3(name: str, given: Arguments) -> str:
    space = "]<]minimax[>["
    values = "".join(f"{space}<{key}>{each}{space}</{key}>" for key, each in given.items())
    invoke = f'{space}<invoke name="{name}">{values}{space}</invoke>'
    return f"{space}<tool_call>\n{invoke}\n{space}</tool_call>"


def _step3(name: str, given: Arguments) -> str:
    values = "".join(
        f'<steptml:parameter name="{key}">{each}</steptml:parameter>\n'
        for key, each in given.items()
    )
    call = (
        f'function<\uff5ctool_sep\uff5c><steptml:invoke name="{name}">\n{values}</steptml:invoke>'
    )
    one = f"<\uff5ctool_call_begin\uff5c>{call}<\uff5ctool_call_end\uff5c>"
    return f"<\uff5ctool_calls_begin\uff5c>\n{one}\n<\uff5ctool_calls_end\uff5c>"


def _kimi(name: str, given: Arguments) -> str:
    call = f"functions.{name}:0<|tool_call_argument_begin|>{json.dumps(given)}"
    one = f"<|tool_call_begin|>{call}<|tool_call_end|>"
    return f"<|tool_calls_section_begin|>{one}<|tool_calls_section_end|>"


def _cohere(name: str, given: Arguments) -> str:
    call = {"tool_call_id": "0", "tool_name": name, "parameters": given}
    return f"<|START_ACTION|>[\n{json.dumps(call)}\n]<|END_ACTION|>"


def _gemma(name: str, given: Arguments) -> str:
    values = ",".join(f'{key}:<|"|>{each}<|"|>' for key, each in given.items())
    return f"<|tool_call>call:{name}{{{values}}}<tool_call|>"


def _minicpm(name: str, given: Arguments) -> str:
    values = "".join(f'<param name="{key}">{each}</param>' for key, each in given.items())
    return f'<function name="{name}">{values}</function>'


def _iquest(name: str, given: Arguments) -> str:
    return _values(name, given).replace("tool_call>", "iquest_tool_call>")


def _horizon(name: str, given: Arguments) -> str:
    pairs = "".join(
        f"<ifm|arg_key>{key}</ifm|arg_key><ifm|arg_value>{each}</ifm|arg_value>"
        for key, each in given.items()
    )
    return f"<ifm|tool_call>{name}{pairs}</ifm|tool_call>"


WRITE: dict[str, Callable[[str, Arguments], str]] = {
    "apertus2509": lambda n, a: f"<|tools_prefix|>[{json.dumps({n: a})}]<|tools_suffix|>",
    "cohere_command4": _cohere,
    "deepseekv3": _deepseek_v3,
    "deepseekv31": _deepseek_v31,
    "deepseekv32": _dsml("function_calls"),
    "deepseekv4": _dsml("tool_calls"),
    "deepseekv41": _dsml("calls", " "),
    "dots": lambda n, a: f"<dots_function_call>\n{_invoke(n, a)}\n</dots_function_call>",
    "gemma4": _gemma,
    "gigachat3": lambda n, a: f"<|message_sep|>\n\nfunction call<|role_sep|>\n{_json(n, a)}",
    "gigachat35": _gcml,
    "hermes": lambda n, a: f"<tool_call>{_json(n, a)}</tool_call>",
    "hunyuan": _hunyuan,
    "interns1": lambda n, a: f"<|action_start|> <|plugin|>\n{_json(n, a)}<|action_end|>",
    "iquest_q1": _iquest,
    "k2_horizon": _horizon,
    "kimi_k2": _kimi,
    "lfm2": lambda n, a: f"<|tool_call_start|>[{_json(n, a)}]<|tool_call_end|>",
    "mimo": _mimo,
    "minicpm5": _minicpm,
    "minimax-m2": lambda n, a: f"<minimax:tool_call>\n{_invoke(n, a)}\n</minimax:tool_call>",
    "minimax-m3": _minimax_m3,
    "mistral": lambda n, a: f"[TOOL_CALLS] [{_json(n, a)}]",
    "step3": _step3,
    **dict.fromkeys(("glm", "glm45", "glm47", "ling3", "poolside_v1"), _values),
    "spark25": _pairs,
    **dict.fromkeys(("qwen", "qwen25", "trinity"), _lines),
    **dict.fromkeys(("nanbeige", "qwen3_coder", "step3p5"), _functions),
}
"""By SGLang's name of the parser."""
