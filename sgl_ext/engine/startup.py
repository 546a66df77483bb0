"""Hooks on an engine's start: refuse what the plugin cannot serve, and wait for every process."""

from __future__ import annotations

import time
from typing import Any

from sgl_ext.engine.core import acknowledgements
from sgl_ext.engine.preflight import CACHE_BACKEND
from sgl_ext.settings.schema import EngineSettings

_DETOKENIZER_TIMEOUT_S = 120.0


def refuse_unsupported(server_args: Any, *_: Any) -> None:
    """After argument parsing: stops the start on what the hooks do not reach."""
    refused = {
        "--tokenizer-worker-num": server_args.tokenizer_worker_num > 1,
        "--grpc-port": server_args.grpc_port is not None,
        "--grpc-mode": server_args.grpc_mode,
        "--smg-grpc-mode": server_args.smg_grpc_mode,
        "--encoder-only": server_args.encoder_only,
    }
    if asked := [flag for flag, on in refused.items() if on]:
        raise SystemExit(
            f"sgl-ext: {', '.join(asked)}: the extension's request hooks run in SGLang's one "
            "Python HTTP process, and this would serve requests past them; leave it out"
        )

    if EngineSettings.from_environment().shared_prefixes:
        _refuse_unshared(server_args)


def _refuse_unshared(server_args: Any) -> None:
    """What has no prefixes to share, or keys of its own making, or hashes of 32 bits a token."""
    refused = {
        "--disable-radix-cache": server_args.disable_radix_cache,
        "--radix-cache-backend": server_args.radix_cache_backend != CACHE_BACKEND,
        "--enable-hierarchical-cache": server_args.enable_hierarchical_cache,
        "--enable-lmcache": server_args.enable_lmcache,
        "--enable-flexkv": server_args.enable_flexkv,
        "--kv-events-config": server_args.kv_events_config is not None,
        "--disaggregation-mode": server_args.disaggregation_mode != "null",
        "--skip-tokenizer-init": server_args.skip_tokenizer_init,
        "--nnodes": server_args.nnodes > 1,
    }
    if asked := [flag for flag, on in refused.items() if on]:
        raise SystemExit(
            f"sgl-ext: {', '.join(asked)}: cannot be with --shared-prefixes; leave one out"
        )


def await_receipts(launched: Any, *_: Any, **__: Any) -> None:
    """After an engine's processes are up: stops the start unless each has verified its hooks.

    A scheduler reports ready only after it loaded plugins, so its receipt is
    there by now or never; a detokenizer reports nothing and may still be importing.
    """
    _, _, _, scheduler_init_result, *_ = launched
    if acknowledgements.count()["scheduler"] < len(scheduler_init_result.scheduler_infos):
        raise SystemExit("sgl-ext: the plugin was not loaded in a scheduler process")
    deadline = time.monotonic() + _DETOKENIZER_TIMEOUT_S
    while not acknowledgements.count()["detokenizer"]:
        if time.monotonic() > deadline:
            raise SystemExit("sgl-ext: the plugin was not loaded in the detokenizer process")
        time.sleep(0.05)
