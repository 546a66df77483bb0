"""The entry point of SGLang's plugin group, which runs once in every process of an engine.

SGLang only logs a plugin's exceptions and serves without it. Half an extension is worse than none,
so every failure here ends the process with a message that names what is missing and the SGLang
version.
"""

import gc
import sys
from importlib.metadata import version

from sgl_ext.engine import sglang_api, sglang_check
from sgl_ext.process import outlive_output

_active = False


def activate() -> None:
    """Applies and verifies this process's hooks. Raises SystemExit if one is missing."""
    global _active
    outlive_output()
    try:
        _activate()
    except Exception as error:
        raise SystemExit(f"sgl-ext: cannot extend SGLang {version('sglang')}: {error}") from error
    _active = True
    # SGLang's modules stay until the process ends, so garbage collections may skip them.
    gc.freeze()


def require_active() -> None:
    """Stops the start if SGLang did not load the plugin in this process."""
    if not _active:
        raise SystemExit("sgl-ext: SGLang did not load the plugin; is the distribution installed?")


def _activate() -> None:
    from sgl_ext.compat import tool_calls
    from sgl_ext.engine.core.folder import acknowledge, open_folder
    from sgl_ext.engine.hooks import Role, apply_hooks, current_role, used_seams, verify
    from sgl_ext.engine.sglang_versions import put_stand_ins
    from sgl_ext.engine.startup import check_environment
    from sgl_ext.engine.topology import CACHE_BACKEND
    from sgl_ext.settings.schema import EngineSettings

    check_environment()
    tool_calls.forward_unknown_tools()
    role, installed = current_role(), version("sglang")
    if role is Role.MAIN:
        open_folder()
    if role in (Role.MAIN, Role.WORKER):
        put_stand_ins(installed)
    if role is Role.MAIN:
        verify(installed)
    if role is Role.SCHEDULER:
        from sgl_ext.compat.sampler import use_linear_regex
        from sgl_ext.engine.scheduler.radix_cache import make_cache

        use_linear_regex(sglang_api.Req, sys.modules[sglang_api.Req.__module__])
        sglang_api.register_radix_cache_backend(CACHE_BACKEND, make_cache)
    settings = EngineSettings.from_environment()
    if settings.draft_from_context != "off":
        from sgl_ext.engine.drafts import algorithm

        sglang_check.verify(sglang_api.DRAFTS, [])
        algorithm.register()
    apply_hooks(role, used_seams(role, shares_prefixes=bool(settings.shared_prefixes)))
    outlive_output()
    acknowledge(role)
