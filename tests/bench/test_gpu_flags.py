"""What SGLang makes of the flags of `make gpu-report` and `make test-gpu` on a GPU, without one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from sgl_ext_cpu.node import local_model

from bench import fanout, pin_flood, priority
from bench.gpu import equality
from bench.gpu.machine import Machine
from sgl_ext.engine import topology
from sgl_ext.engine.serve import cache_flags, priority_flags
from sgl_ext.settings.sources import launch_settings
from tests.engine.test_model_families import BLACKWELL, HOPPER, device, sglang
from tests.gpu_engines import FLAGS as TEST_FLAGS

pytestmark = pytest.mark.long  # imports SGLang's scheduler
DEVICES = pytest.mark.parametrize("sm", [HOPPER, BLACKWELL])


def resolved(sm: int, config: Path, *flags: str, is_stock: bool = False) -> Any:
    """The arguments of an engine with these settings and flags on a device."""
    model = str(local_model("small-config"))
    settings = launch_settings(["--config", str(config), "--model-path", model, *flags])
    argv = ["--model-path", model, "--device", "cuda", *settings.engine_args]
    more = [] if is_stock else [*cache_flags(argv), *priority_flags(argv)]
    server_args = sglang("server_args")
    sglang("arg_groups.pipeline")
    with device(sm), warnings.catch_warnings(action="ignore"):
        given = server_args.prepare_server_args([*argv, *more])
        return topology.facts_of(given).args


@pytest.fixture
def configs(tmp_path: Path) -> tuple[Path, Path]:
    return Machine("0", "small-config").write_configs(tmp_path)


@DEVICES
def test_the_engines_of_the_facts_have_what_sglang_chooses(
    configs: tuple[Path, Path], sm: int
) -> None:
    found = resolved(sm, configs[0], *fanout.FLAGS)
    assert found.load_format == "dummy"
    assert found.max_total_tokens == 196_608
    assert not found.disable_overlap_schedule
    assert found.cuda_graph_config.decode.backend == "full"
    assert found.page_size == (1 if sm == HOPPER else 64)


@DEVICES
def test_engines_of_the_other_benches_capture_few_graphs(
    configs: tuple[Path, Path], sm: int
) -> None:
    for flags in (pin_flood.FLAGS, priority.FLAGS):
        graphs = resolved(sm, configs[1], *flags).cuda_graph_config
        assert graphs.prefill.backend == "disabled"
        assert max(graphs.decode.bs) == 16
    for _, flags in (*pin_flood.ARMS.values(), *priority.ARMS.values()):
        words = [word for word in flags if word not in ("--pin-budget", "0.3334")]
        assert resolved(sm, configs[1], *words, is_stock=True).max_running_requests is not None


@DEVICES
@pytest.mark.parametrize("is_test", [False, True])
def test_deterministic_kernels_leave_the_radix_cache_on(
    configs: tuple[Path, Path], sm: int, is_test: bool
) -> None:
    backend = "triton" if sm == BLACKWELL else "fa3"
    given = ("--attention-backend", backend)
    flags = (*TEST_FLAGS, *given) if is_test else equality.flags_with(backend)
    found = resolved(sm, configs[1], *flags)
    assert found.enable_deterministic_inference
    assert found.attention_backend == backend
    assert not found.disable_radix_cache
    assert found.page_size == 1
