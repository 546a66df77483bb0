"""The platform: SGLang's engine on a CPU, with no CUDA package and no sgl_kernel.

SGLang finds `activate` through the entry-point group `sglang.srt.platforms` and calls it in every
process: the server, each scheduler and the detokenizer. It makes the changes that must come before
the engine's own modules are imported. Each worker calls `init_backend` after those imports, for
the changes that need them.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sgl_ext_cpu import gate, host_copies, stubs, unforgiving
from sgl_ext_cpu.nursery import fork_children

NAME = "sgl_ext_cpu"
"""The platform's entry point, the value of SGLANG_PLATFORM, and the attention backend."""

OWN_TOKEN = "sgl_ext_cpu_own_token"
"""An attention backend in which a token sees only itself, so a prompt's cost is linear. Its answers
mean nothing: it is for measuring all the other work on very long prompts."""

SCRIPT = "SGLEXT_CPU_SCRIPT"
"""The variable that names a file of prescribed answers; without it the model answers."""

FORK = "SGLEXT_CPU_FORK"
"""The variable that makes a server fork its children, which saves their imports."""

PAGE = "SGLEXT_CPU_PAGE_SIZE"
"""The variable that names the page size of an engine whose flags name none, as an attention backend
of a GPU decides it."""

UNFORGIVING = "SGLEXT_CPU_UNFORGIVING"
"""The variable that makes reads of freed memory and of unfinished copies show in answers."""

_THREADS_STEP = "sglang.srt.distributed.bootstrap._init_cpu_threads_env"
_CONTROLLER = "sglang.srt.managers.data_parallel_controller.DataParallelController.event_loop"
_threads_settled = False


def activate() -> str | None:
    """Return the platform's class for SGLang to load, or None to decline.

    It declines unless SGLANG_PLATFORM names it: an engine must not run on the CPU because its
    driver is too old, or its torch is built without CUDA. GPUs that are there are hidden, as SGLang
    would load their kernels.
    """
    if os.environ.get("SGLANG_PLATFORM") != NAME:
        # Programs that import SGLang and run no engine, such as its load generator, need no more.
        stubs.install()
        return None
    os.environ |= dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        raise RuntimeError(
            "SGLANG_USE_CPU_ENGINE=1 selects SGLang's own CPU engine, which needs "
            f"sgl_kernel: unset it to use the {NAME} platform"
        )
    stubs.install()
    _offer_attention_backend()
    _settle_threads_ourselves()
    _punish_early_reads()
    # Children inherit it. A value that the user set stays.
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "sgl_ext_cpu.models")
    # A prefill engine would send cached KV early, and wait for CUDA's events.
    os.environ.setdefault("SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX", "0")
    return f"{__name__}:CpuPlatform"


def _offer_attention_backend() -> None:
    """Make --attention-backend accept our names. SGLang reads the list when it parses arguments."""
    from sglang.srt.arg_groups import choices

    for name in (NAME, OWN_TOKEN):
        if name not in choices.ATTENTION_BACKEND_CHOICES:
            choices.add_attention_backend_choices([name])


def _punish_early_reads() -> None:
    """With SGLEXT_CPU_UNFORGIVING=1. A server that is forked learns of it only when it resolves its
    arguments."""
    if _asked(UNFORGIVING) == "1":
        unforgiving.install()


def _settle_threads_ourselves() -> None:
    """Replace a step that calls sgl_kernel on arm64, and that binds nothing elsewhere.

    The step runs before a worker calls `init_backend`, and SGLang applies hooks before the step.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if _THREADS_STEP not in HookRegistry._hooks:
        HookRegistry.register(_THREADS_STEP, _begin_worker, HookType.REPLACE)
        HookRegistry.register(_CONTROLLER, _wait_for_requests, HookType.BEFORE)


def _wait_for_requests(controller: Any) -> None:
    """Let the controller of data-parallel ranks sleep until a request arrives: SGLang's asks again
    and again, and takes a core."""
    from sglang.srt.managers import data_parallel_controller as module

    receive = module.sock_recv

    def wait(source: Any, **kw: Any) -> Any:
        source.poll(1000)
        return receive(source, **kw)

    if hasattr(controller, "recv_from_tokenizer"):  # on the first node
        module.sock_recv = wait


class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # sglang is untyped
    """Runs every operator as plain torch and claims no other capability."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return NAME

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_device(self, device_id: int | None = 0) -> str:
        # A string, as the base class declares it: the CPU mixin returns a torch.device,
        # on which resolving an omitted --device fails.
        return "cpu"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Set the arguments that the user did not set.

        - attention: our backend, because SGLang's default needs AMX kernels.
        - dtype: float32. Without AVX512-BF16 or AMX a bfloat16 matrix product is about
          eight times slower, and in float32 results agree with a reference closely.
        - hicache_io_backend: direct, because the other one is kernels of a GPU.
        - disaggregation_decode_retraction_backup: SGLang's default registers memory with CUDA.
        - sleep_on_idle: an idle scheduler would otherwise spin on a core.

        - page_size: that of SGLEXT_CPU_PAGE_SIZE, if there is one.

        If SGLEXT_CPU_SCRIPT names a script, the server gives its answers. With
        SGLEXT_CPU_FORK=1 the server forks its children.
        """
        asked = getattr(server_args, "_raw_input", None) or {}
        if asked.get("attention_backend") is None:
            server_args.attention_backend = NAME
        if server_args.dtype == "auto":
            server_args.dtype = "float32"
        if server_args.disaggregation_decode_retraction_backup is None:
            server_args.disaggregation_decode_retraction_backup = "none"
        server_args.sleep_on_idle = True
        if server_args.hicache_io_backend == "kernel":
            server_args.hicache_io_backend = "direct"
        if server_args.hicache_io_backend != "direct":
            flag = f"--hicache-io-backend={server_args.hicache_io_backend}"
            raise ValueError(f"{flag}: on the {NAME} platform there is direct alone")
        if (page := _asked(PAGE)) and asked.get("page_size") is None:
            server_args.page_size = int(page)
        _punish_early_reads()
        if script := _asked(SCRIPT):
            # It needs SGLang's own modules, which are imported after this one.
            from sgl_ext_cpu import scripted

            scripted.play(Path(script), server_args)
        if _asked(FORK) == "1":
            fork_children()

    def init_backend(self) -> None:
        """Register the attention backend, and keep Triton out of page bookkeeping.

        SGLang calls this in each worker, when it imports the model runner.
        """
        from sglang.srt.layers.attention.attention_registry import (
            ATTENTION_BACKENDS,
            register_attention_backend,
        )
        from sglang.srt.mem_cache import allocation

        if NAME not in ATTENTION_BACKENDS:
            register_attention_backend(NAME)(_attention_backend)
            register_attention_backend(OWN_TOKEN)(_own_token_backend)
        # `get_last_loc` launches a Triton kernel for every backend it does not know by
        # name, whatever the platform's capabilities say; with pages larger than one
        # token that would fail on the first request.
        allocation.get_last_loc_triton = allocation.get_last_loc_torch
        _gather_without_cuda()
        _verify_without_triton()


def _gather_without_cuda() -> None:
    """Let the ranks of data-parallel attention gather tokens without pinned memory and Triton."""
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.layers import dp_attention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    # The public ones are operators that SGLang registers for its own devices.
    GroupCoordinator.all_gather_into_tensor = GroupCoordinator._all_gather_into_tensor
    GroupCoordinator.reduce_scatter_tensor = GroupCoordinator._reduce_scatter_tensor
    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    ForwardBatch.use_pin_memory = property(lambda self: False, lambda self, value: None)


def _verify_without_triton() -> None:
    """Let a speculative algorithm whose drafts are chains take slots without Triton's kernels.

    What a verification accepts of a chain is where it belongs, so no key or value is moved.
    """
    from sglang.srt.mem_cache import allocation
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    def assign(
        rows: torch.Tensor,
        table: torch.Tensor,
        begins: torch.Tensor,
        ends: torch.Tensor,
        slots: torch.Tensor,
        batch_size: int,
    ) -> None:
        del batch_size
        done = 0
        places = zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True)
        for row, begin, end in places:
            if end > begin:
                table[row, begin:end] = slots[done : done + end - begin]
                done += end - begin

    allocation.assign_req_to_token_pool_func = assign
    MHATokenToKVPool._init_kv_copy_and_warmup = lambda pool: None


def _send_pageable_indices() -> None:
    """Let a prefill engine send KV without pinned memory, which only an accelerator has."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    MooncakeKVSender.supports_host_tensor_indices = False


def _pin_nothing() -> None:
    """Make torch ignore requests for pinned memory: without an accelerator it has none.

    SGLang's LoRA asks for it whatever the platform says.
    """

    def unpinned(make: Any) -> Any:
        @functools.wraps(make)
        def made(*args: Any, pin_memory: bool = False, **kw: Any) -> Any:
            return make(*args, **kw)

        return made

    for name in ("arange", "empty", "tensor", "zeros"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self


def _attention_backend(model_runner: Any) -> Any:
    from sgl_ext_cpu.backend import CpuAttentionBackend

    # SGLang only logs a hook that could not be applied.
    if not _threads_settled:
        raise RuntimeError(f"the {NAME} platform's hook on {_THREADS_STEP} was not applied")
    return CpuAttentionBackend(model_runner)


def _own_token_backend(model_runner: Any) -> Any:
    from sgl_ext_cpu.own_token import OwnTokenBackend

    return OwnTokenBackend(model_runner)


def _begin_worker(**cores: Any) -> None:
    """What a worker does before its model is made, and after SGLang's arguments are published."""
    from sglang.srt.runtime_context import get_disagg, get_lora, get_memory

    _bind_threads(**cores)
    gate.install()
    if get_memory().enable_hierarchical_cache:
        host_copies.install()
    if get_disagg().disaggregation_mode == "prefill":
        _send_pageable_indices()
    if get_lora().enable_lora:
        _pin_nothing()


def _bind_threads(*, local_omp_cpuid: str | None, dist_init_method: str | None = None) -> None:
    """Set the number of threads of this rank, and their cores.

    SGLANG_CPU_OMP_THREADS_BIND lists its cores, OMP_NUM_THREADS gives the number of threads. With
    neither, one core is left to the server and the detokenizer: threads that wait for a core that
    another process holds cost far more than the core gains.
    """
    global _threads_settled
    del dist_init_method
    _threads_settled = True
    if local_omp_cpuid is not None and _asked("SGLANG_CPU_OMP_THREADS_BIND") not in ("", "all"):
        cores = _cores(local_omp_cpuid)
        if hasattr(os, "sched_setaffinity"):  # Linux; inherited by the threads torch starts
            os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))
    elif not _asked("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))


def _asked(variable: str) -> str:
    return os.environ.get(variable, "")


def _cores(text: str) -> set[int]:
    """The cores in a list such as `0-3,8`."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            cores |= set(range(int(first), int(last or first) + 1))
        except ValueError:
            raise ValueError(f"SGLANG_CPU_OMP_THREADS_BIND: {text!r} names no cores") from None
    return cores
