"""The platform's own decisions: when it declines, what it offers, what it rejects."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from sgl_ext_cpu import platform, stubs


def defaults(**arguments: object) -> SimpleNamespace:
    filled = SimpleNamespace(
        _raw_input=arguments,
        attention_backend="intel_amx",
        dtype="auto",
        disaggregation_decode_retraction_backup=None,
        sleep_on_idle=False,
        hicache_io_backend="kernel",
    )
    for name, value in arguments.items():
        setattr(filled, name, value)
    platform.CpuPlatform().apply_server_args_defaults(filled)
    return filled


def test_it_declines_unless_it_is_named_and_then_hides_the_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("SGLANG_PLATFORM")
    assert platform.activate() is None
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    monkeypatch.setenv("SGLANG_PLATFORM", platform.NAME)
    assert platform.activate() == "sgl_ext_cpu.platform:CpuPlatform"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == os.environ["HIP_VISIBLE_DEVICES"] == ""


@pytest.mark.long
@pytest.mark.slow
def test_sglangs_load_generator_runs_without_a_gpu_and_without_a_name() -> None:
    command = [sys.executable, "-m", "sglang.benchmark.serving", "--help"]
    environment = {**os.environ, "SGLANG_PLATFORM": ""}
    subprocess.run(command, env=environment, capture_output=True, check=True)


def test_sglangs_own_cpu_engine_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    with pytest.raises(RuntimeError, match="SGLANG_USE_CPU_ENGINE"):
        platform.activate()


def test_its_attention_backends_can_be_selected() -> None:
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES

    platform.activate()
    platform.activate()
    assert ATTENTION_BACKEND_CHOICES.count(platform.NAME) == 1
    assert ATTENTION_BACKEND_CHOICES.count(platform.OWN_TOKEN) == 1


def test_arguments_that_are_not_set_get_a_default() -> None:
    filled = defaults()
    assert (filled.attention_backend, filled.dtype) == (platform.NAME, "float32")
    assert filled.disaggregation_decode_retraction_backup == "none"
    assert filled.sleep_on_idle
    assert filled.hicache_io_backend == "direct"


def test_copies_of_other_hardware_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"--hicache-io-backend=kernel_ascend: .* direct alone"):
        defaults(hicache_io_backend="kernel_ascend")


def test_arguments_that_are_set_stay() -> None:
    filled = defaults(attention_backend="torch_native", dtype="bfloat16")
    assert (filled.attention_backend, filled.dtype) == ("torch_native", "bfloat16")


def test_a_page_size_is_a_default_that_a_flag_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLEXT_CPU_PAGE_SIZE", "64")
    assert defaults().page_size == 64
    assert defaults(page_size=16).page_size == 16


def test_a_core_is_left_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(platform.torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(platform.torch, "get_num_threads", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    platform._bind_threads(local_omp_cpuid="0-7")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    platform._bind_threads(local_omp_cpuid="0-7")
    assert chosen == [7]


@pytest.mark.parametrize(("text", "cores"), [("0", {0}), ("0,2", {0, 2}), ("1-3,8", {1, 2, 3, 8})])
def test_cores(text: str, cores: set[int]) -> None:
    assert platform._cores(text) == cores


def test_a_bad_list_of_cores_is_named() -> None:
    with pytest.raises(ValueError, match="SGLANG_CPU_OMP_THREADS_BIND: 'a-b'"):
        platform._cores("a-b")


def test_stubs_can_be_imported_and_not_called() -> None:
    """In a new interpreter: this one may have a torchvision, or must not get a false one."""
    code = """
import sgl_ext_cpu.stubs as stubs
assert stubs.install() and stubs.install()
from torchvision.transforms import InterpolationMode, functional
from torchvision.transforms.v2 import Compose
import torchvision.io
assert InterpolationMode.BICUBIC is not None
try:
    Compose([])
except stubs.TorchvisionMissing as error:
    assert "torchvision.transforms.v2.Compose was called" in str(error)
else:
    raise AssertionError
from transformers.utils import is_torchvision_available
assert not is_torchvision_available()
"""
    if not stubs.install():
        pytest.skip("torchvision is installed")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_controller_of_ranks_sleeps_until_a_request_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.managers import data_parallel_controller

    done: list[object] = []
    source = SimpleNamespace(poll=lambda limit_ms: done.append(limit_ms))
    monkeypatch.setattr(data_parallel_controller, "sock_recv", lambda _, **kw: done.append(kw))
    platform._wait_for_requests(SimpleNamespace(recv_from_tokenizer=source))
    data_parallel_controller.sock_recv(source, flags=1)
    assert done == [1000, {"flags": 1}]
