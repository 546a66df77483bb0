"""One engine: `python -m sgl_ext.engine.serve` takes SGLang's own flags and serves with the plugin.

It is `sglang serve` with two guarantees: nothing starts unless the plugin is active, and the engine
ends when the process that started it ends.
"""

import gc
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise

from sgl_ext.engine import sglang_api
from sgl_ext.engine.arguments import resolved
from sgl_ext.engine.core.workers import stop_watching
from sgl_ext.engine.drafts.algorithm import draft_flags
from sgl_ext.engine.plugin import require_active
from sgl_ext.engine.startup import check_environment, require_secret
from sgl_ext.engine.topology import CACHE_BACKEND
from sgl_ext.process import end_with_parent
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

# When a child dies, SGLang's HTTP process dumps the stacks and the GPU memory of the schedulers
# before it ends. Meanwhile it serves nothing, for 5 s, or 65 s if a scheduler is still alive.
_CRASH_DUMPS = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")

if __name__ in ("__main__", "__mp_main__"):  # a server, or a child of one
    # Imported modules stay, and a request leaves few reference cycles. With Python's defaults, the
    # collector takes a fifth of a start, and runs many times for each request.
    gc.set_threshold(100_000, 20, 100)


def main(argv: list[str]) -> None:
    """Serves until it is stopped. Raises SystemExit on bad flags or a missing hook."""
    # A terminal that closes ends nothing.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for name in _CRASH_DUMPS:
        os.environ.setdefault(name, "0")
    with _named_problems():
        check_environment()
        require_secret(_host(argv))
        require_device()

    sglang_api.load_plugins()
    require_active()

    try:
        with _named_problems():
            drafts = draft_flags(argv, EngineSettings.from_environment())
        own = [*cache_flags(argv), *priority_flags(argv), *drafts]
        args = sglang_api.prepare_server_args([*argv, *own])
        with _named_problems():
            require_secret(resolved(args).host)  # SGLang's --config may have named another
        sglang_api.run_server(args)
    finally:
        stop_watching()
        sglang_api.kill_process_tree(os.getpid(), include_parent=False)


def require_device(environ: Mapping[str, str] = os.environ) -> None:
    """Raises RuntimeError if torch sees no GPU, and no other platform of SGLang is named. SGLang
    would fail in the middle of its imports."""
    if environ.get("SGLANG_PLATFORM") or environ.get("SGLANG_USE_CPU_ENGINE", "0") != "0":
        return
    torch = import_module("torch")
    if not torch.accelerator.is_available():
        do = "to run on the CPU, set SGLANG_PLATFORM=sgl_ext_cpu"
        raise RuntimeError(f"torch {torch.__version__} sees no GPU; {do}")


def cache_flags(argv: Sequence[str]) -> tuple[str, ...]:
    """The flags that select the extension's radix cache.

    None if `argv` selects a cache, or a feature that SGLang combines with its own caches only. Such
    an engine pins nothing and publishes no prefixes. The extension's cache gives prefixes an
    eviction priority, which only SGLang's eviction policy `priority` reads.
    """
    given = _named(argv)
    if given & _OWN_CACHE:
        return ()
    policy = () if _EVICTION in given else (_EVICTION, "priority")
    return ("--radix-cache-backend", CACHE_BACKEND, *policy)


def priority_flags(argv: Sequence[str]) -> tuple[str, ...]:
    """The flags that turn priority scheduling on; none if `argv` sets a policy of its own.

    SGLang preempts for a slot only if the difference exceeds the threshold, so it is one less.
    """
    if _named(argv) & _OWN_SCHEDULING:
        return ()
    threshold = EngineSettings.from_environment().preemption_threshold - 1
    flags = ["--enable-priority-scheduling", "--default-priority-value", "0"]
    return (*flags, "--priority-scheduling-preemption-threshold", str(threshold))


@contextmanager
def _named_problems() -> Iterator[None]:
    """Ends the process with the reason, and without a traceback, if it cannot start."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise SystemExit(f"sgl-ext: {error}") from None


def _host(argv: Sequence[str]) -> str:
    """The address that a command line names, of several the last, or SGLang's default."""
    words = [word for flag in argv for word in flag.split("=", 1)]
    hosts = [value for flag, value in pairwise(words) if flag == "--host"]
    return hosts[-1] if hosts else "127.0.0.1"


def _named(argv: Sequence[str]) -> set[str]:
    """The names of the flags in a command line."""
    return {flag.partition("=")[0] for flag in argv}


if __name__ == "__main__":
    end_with_parent()
    main(sys.argv[1:])
