"""The GPUs of an engine, as SGLang starts processes for them."""

from __future__ import annotations

import pytest

from sgl_ext.node.devices.sizes import gpus_of_engine
from sgl_ext.settings.schema import LaunchSettings, SettingsError


@pytest.mark.parametrize(
    ("tp", "flags", "count", "shown"),
    [
        (1, "", 1, "tp=1"),
        (2, "--pp-size 2", 4, "tp=2 x pp=2"),
        (2, "--pipeline-parallel-size=2 --data-parallel-size 3", 12, "tp=2 x pp=2 x dp=3"),
        (1, "--dp 2", 2, "tp=1 x dp=2"),
        (1, "--no-such-flag", 1, "tp=1"),
        (4, "--attn-dp-size 4 --attn-cp-size 2 --ep-size 4 --moe-dp-size 2", 4, "tp=4"),
        (4, "--dp-size 4 --enable-dp-attention", 4, "tp=4"),
        (8, "--nnodes 2 --node-rank 0", 4, "tp=8 on nnodes=2"),
        (2, "--gpu-id-step 2 --base-gpu-id 1", 4, "tp=2, --base-gpu-id 1, --gpu-id-step 2"),
        (1, "--pp-size 2 --pp-size 4", 4, "tp=1 x pp=4"),
        (1, "--dp-size 2 --data-parallel-size 2", 2, "tp=1 x dp=2"),
    ],
)
def test_every_process_of_sglang_counts(tp: int, flags: str, count: int, shown: str) -> None:
    settings = LaunchSettings(model_path="m", tp=tp, engine_args=tuple(flags.split()))
    assert gpus_of_engine(settings) == (count, shown)


def test_two_names_that_disagree_are_refused_by_name() -> None:
    flags = ("--pp-size", "2", "--pipeline-parallel-size", "4")
    with pytest.raises(SettingsError, match="--pp-size=2 and --pipeline-parallel-size=4: two name"):
        gpus_of_engine(LaunchSettings(model_path="m", engine_args=flags))
    with pytest.raises(SettingsError, match="the launcher's own setting is tp"):
        gpus_of_engine(LaunchSettings(model_path="m", engine_args=("--tensor-parallel", "2")))
