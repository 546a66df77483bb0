"""The entry point of SGLang's plugin group: runs once in every process of an engine.

SGLang swallows a plugin's exceptions and serves without it. A plugin that is
half there is worse than none, so every failure here ends the process, naming
what is missing and the SGLang version.
"""

from __future__ import annotations

import os

_applied: list[str] | None = None


def activate() -> None:
    """Applies and verifies this process's hooks. Raises SystemExit if one is missing."""
    global _applied
    try:
        _applied = _activate()
    except Exception as error:
        from sglang.version import __version__

        raise SystemExit(f"sgl-ext: cannot extend SGLang {__version__}: {error}") from error


def require_active() -> None:
    """Stops the start if SGLang did not load the plugin in this process."""
    if _applied is None:
        allowed = os.environ.get("SGLANG_PLUGINS")
        raise SystemExit(
            "sgl-ext: SGLang did not load the plugin"
            + (f": SGLANG_PLUGINS={allowed!r} leaves out 'sgl_ext'" if allowed else "")
        )


def _activate() -> list[str]:
    from sglang.srt.environ import envs
    from sglang.version import __version__

    from sgl_ext.engine import receipts
    from sgl_ext.engine.hooks import SUPPORTED_SGLANG, Role, apply_hooks, current_role

    if __version__ != SUPPORTED_SGLANG:
        raise RuntimeError(f"it is made for SGLang {SUPPORTED_SGLANG} alone")
    if envs.SGLANG_RUST_SERVER.get():
        raise RuntimeError("SGLANG_RUST_SERVER is set, and its front end has no hooks: unset it")
    role = current_role()
    if role is Role.MAIN:
        receipts.open_folder()
    symbols = apply_hooks(role)
    receipts.leave(role, symbols)
    return symbols
