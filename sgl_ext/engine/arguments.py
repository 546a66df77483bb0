"""What SGLang decided about this engine: the only reader of SGLang's arguments.

`ServerArgs` keeps what the operator wrote. What SGLang resolved stands beside it: the page size
that an attention backend needs, or the caches that `--enable-dp-attention` makes. So a field of the
record itself may be None, or not what the engine does. `tests/engine/test_arguments.py` lets no
other module read one.
"""

from typing import TYPE_CHECKING, Any, cast

import msgspec

from sgl_ext.engine import sglang_api

if TYPE_CHECKING:
    from sgl_ext.engine.sglang_types import ResolvedArgs, ServerArgs


def resolved(args: "ServerArgs") -> "ResolvedArgs":
    """The arguments of an engine that is about to start, after SGLang has resolved them.

    Raises what SGLang raises for arguments that it refuses.
    """
    args.resolve_once()
    return sglang_api.resolving_view(args)


def as_given(args: "ServerArgs") -> dict[str, Any]:
    """What the operator wrote, and SGLang's defaults for the rest, by name."""
    return msgspec.structs.asdict(cast(msgspec.Struct, args))


def being_resolved(args: "ServerArgs") -> "ResolvedArgs":
    """The arguments while SGLang resolves them: what it has decided of them so far."""
    return sglang_api.resolving_view(args)


def in_effect() -> "ResolvedArgs":
    """The arguments in effect in this process of an engine. Raises ValueError before SGLang has
    published them, which it does before it starts what the process is for."""
    return cast("ResolvedArgs", _PUBLISHED)


def caches(args: "ResolvedArgs") -> int:
    """How many radix caches an engine has, each with its own scheduler: its replicas, and the
    groups of data-parallel attention."""
    return args.dp_size * args.attn_dp_size


class _Published:
    """Each attribute is the value in effect of the argument of this name."""

    def __getattr__(self, name: str) -> Any:
        return sglang_api.get_context().config_leaf(name)


_PUBLISHED = _Published()
