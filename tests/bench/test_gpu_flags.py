"""What SGLang makes of the flags of `make gpu-report` and `make test-gpu` on a GPU, without one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from sgl_ext_cpu.node import local_model

from bench.gpu.groups import GROUPS
from bench.gpu.machine import Machine
from sgl_ext.engine import topology
from sgl_ext.engine.serve import cache_flags, priority_flags
from sgl_ext.settings.sources import launch_settings
from tests.engine.test_model_families import BLACKWELL, HOPPER, device, sglang
from tests.gpu_engines import FLAGS as TEST_FLAGS
from tests.gpu_engines import without

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
def machine(sm: int) -> Machine:
    backend = "triton" if sm == BLACKWELL else "fa3"
    return Machine("0", "small-config", "small-config", deterministic=backend)


@DEVICES
@pytest.mark.parametrize("name", GROUPS)
def test_sglang_takes_the_settings_of_each_group(
    tmp_path: Path, machine: Machine, sm: int, name: str
) -> None:
    group, config = GROUPS[name], tmp_path / "engines.toml"
    config.write_text(machine.config(group))
    for arm, flags in group.arms.items():
        words = without(flags, {"--host-pin-budget": 2})  # ours, which SGLang does not know
        found = resolved(sm, config, *words, is_stock=arm != "ours")
        assert found.load_format == "dummy"
        assert found.max_total_tokens == group.pool_tokens
        assert found.max_running_requests == group.slots
        assert not found.disable_overlap_schedule
        assert not found.disable_radix_cache
        assert found.cuda_graph_config.prefill.backend == "disabled"
        assert found.enable_deterministic_inference == group.is_judge
        if group.is_judge:
            assert found.attention_backend == machine.deterministic
            assert found.page_size == 1
        else:
            assert found.cuda_graph_config.decode.backend == "full"
            assert max(found.cuda_graph_config.decode.bs) == group.slots


@DEVICES
def test_deterministic_kernels_of_the_tests_leave_the_radix_cache_on(
    tmp_path: Path, machine: Machine, sm: int
) -> None:
    config = tmp_path / "engines.toml"
    config.write_text(machine.config(GROUPS["narrow"]))
    given = ("--attention-backend", machine.deterministic)
    found = resolved(sm, config, *TEST_FLAGS, *given)
    assert found.enable_deterministic_inference
    assert found.attention_backend == machine.deterministic
    assert not found.disable_radix_cache
    assert found.page_size == 1
