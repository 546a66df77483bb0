"""In the HTTP process: chat templates, compiled to code that asks Jinja's sandbox less often.

The sandbox checks each attribute and each call of a template while it renders. For the values of
chats the answers are known, and the code has them in it:

    message.role             a dict's key
    text.startswith('<t>')   a text's method, called with constants and variables
    loop.first               a public attribute of a loop

Each place asks the sandbox if the value has another class. So what is rendered, and what is
forbidden, are equal in all cases.
"""

import json
from collections.abc import Callable
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

from sgl_ext.compat.broken_arguments import WrittenArguments
from sgl_ext.engine.sglang_types import Original

_OF_DICTS = frozenset(dir(dict))
_OF_LOOPS = frozenset(name for name in dir(LoopContext) if not name.startswith("_"))
# The sandbox formats by itself.
_OF_TEXTS = frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"}
_PLAIN = (str, bool, int)


def compile_template(original: Original, source: str) -> Any:
    """Around the compilation of chat templates, which caches what it compiled."""
    environment = original(source).environment
    known = vars(environment)
    if "quick_template" not in known:
        environment.code_generator_class = _QuickCode
        environment.getattr = _quick_getattr(environment)
        environment.filters["tojson"] = _quick_json(environment.filters["tojson"])
        environment.quick_template = environment.from_string(source)
    return known["quick_template"]


class _QuickCode(CodeGenerator):
    """Writes short ways for attributes and calls into a template's code."""

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:
        name, value = node.attr, self.temporary_identifier()
        if name in _OF_LOOPS and isinstance(node.node, nodes.Name) and node.node.name == "loop":
            short, condition = f"{value}.{name}", "is LoopContext"
        elif name not in _OF_DICTS | _OF_TEXTS:
            short, condition = f"{value}[{name!r}]", f"is dict and {name!r} in {value}"
        else:
            super().visit_Getattr(node, frame)
            return
        self.write(f"({short} if type({value} := ")
        self.visit(node.node, frame)
        self.write(f") {condition} else environment.getattr({value}, {name!r}))")

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        method = node.node
        has_options = node.kwargs or node.dyn_args or node.dyn_kwargs or forward_caller
        # The arguments are written twice.
        are_short = all(isinstance(each, (nodes.Const, nodes.Name)) for each in node.args)
        if (
            has_options
            or not are_short
            or not isinstance(method, nodes.Getattr)
            or method.attr not in _OF_TEXTS
        ):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        value = self.temporary_identifier()
        self.write(f"({value}.{method.attr}(")
        for argument in node.args:
            self.visit(argument, frame)
            self.write(", ")
        self.write(f") if type({value} := ")
        self.visit(method.node, frame)
        self.write(") is str else environment.call(context, ")
        self.write(f"environment.getattr({value}, {method.attr!r})")
        scopes = {"_loop_vars": frame.loop_frame, "_block_vars": frame.block_frame}
        self.signature(node, frame, {name: name for name, is_open in scopes.items() if is_open})
        self.write("))")


def _quick_getattr(environment: Any) -> Callable[[Any, str], Any]:
    """`environment.getattr`, with a short way for a key that a dict lacks, and for namespaces."""
    sandboxed = environment.getattr

    def quick(value: Any, name: str) -> Any:
        kind = type(value)
        if kind is dict and name not in _OF_DICTS:
            return value[name] if name in value else environment.undefined(obj=value, name=name)
        if kind is Namespace and not name.startswith("_"):
            found = getattr(value, name, None)
            if type(found) in _PLAIN:
                return found
        return sandboxed(value, name)

    return quick


def _quick_json(original: Callable[..., str]) -> Callable[..., str]:
    """The filter `tojson`, which makes an encoder for each value. Arguments of a call that are no
    object are what the model wrote."""
    encode = json.JSONEncoder(ensure_ascii=False).encode

    def quick(value: Any, *args: Any, **options: Any) -> str:
        if type(value) is WrittenArguments:
            return value.text
        return original(value, *args, **options) if args or options else encode(value)

    return quick
