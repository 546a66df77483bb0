"""One engine: `python -m sgl_ext.engine.serve` takes SGLang's own flags and serves with the plugin.

It is `sglang serve` plus two certainties: the plugin is active or nothing
starts, and the engine ends when whoever started it is gone.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

from sgl_ext.engine import sglang_api
from sgl_ext.engine.plugin import require_active
from sgl_ext.engine.preflight import CACHE_BACKEND, check_environment
from sgl_ext.node.lifeline import end_with_parent
from sgl_ext.settings.schema import EngineSettings

_OWN_SCHEDULING = {
    "--schedule-policy",
    "--enable-priority-scheduling",
    "--disable-priority-preemption",
    "--default-priority-value",
    "--schedule-low-priority-values-first",
    "--priority-scheduling-preemption-threshold",
    "--disaggregation-mode",
}
_EVICTION = "--radix-eviction-policy"
_OWN_CACHE = {
    "--radix-cache-backend",
    "--enable-kv-cache-sharding",
    "--enable-int8-mamba-checkpoint",
    "--enable-unified-cache-external-linker",
}

if __name__ in ("__main__", "__mp_main__"):  # a server, or a child of one
    # What is imported stays, and what a request is made of is gone with it, mostly: by Python's own
    # figures garbage is looked for during a fifth of a start, and many times in every turn.
    gc.set_threshold(100_000, 20, 100)


def main(argv: list[str]) -> None:
    """Serves until told to stop. Raises SystemExit on bad flags or a missing hook."""
    try:
        check_environment()
    except (RuntimeError, ValueError) as error:
        raise SystemExit(f"sgl-ext: {error}") from None

    sglang_api.load_plugins()
    require_active()

    try:
        sglang_api.run_server(
            sglang_api.prepare_server_args([*argv, *cache_flags(argv), *priority_flags(argv)])
        )
    finally:
        sglang_api.kill_process_tree(os.getpid(), include_parent=False)


def cache_flags(argv: Sequence[str]) -> tuple[str, ...]:
    """What selects our radix cache: nothing if `argv` selects one, or what SGLang pairs with none.

    Such an engine serves as it would without us: it pins nothing and tells of no prefixes.
    Our cache ranks what it stores, which counts under the `priority` policy of eviction only.
    """
    given = _named(argv)
    if given & _OWN_CACHE:
        return ()
    policy = () if _EVICTION in given else (_EVICTION, "priority")
    return ("--radix-cache-backend", CACHE_BACKEND, *policy)


def priority_flags(argv: Sequence[str]) -> tuple[str, ...]:
    """What turns priority scheduling on; nothing if `argv` has another policy of its own.

    The threshold is of SGLang's own preemption, for a slot, which wants it exceeded.
    """
    if _named(argv) & _OWN_SCHEDULING:
        return ()
    threshold = EngineSettings.from_environment().preemption_threshold - 1
    flags = ["--enable-priority-scheduling", "--default-priority-value", "0"]
    return (*flags, "--priority-scheduling-preemption-threshold", str(threshold))


def _named(argv: Sequence[str]) -> set[str]:
    """The flags of a command line, without what some have behind an equals sign."""
    return {flag.partition("=")[0] for flag in argv}


if __name__ == "__main__":
    end_with_parent()
    main(sys.argv[1:])
