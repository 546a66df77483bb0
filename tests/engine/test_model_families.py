"""What SGLang chooses for each model family on CUDA devices, and what the extension does with it.

There is no device: SGLang's own resolution runs with the platform's facts replaced. The table of
docs/guide/models.md is what is asserted.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from sgl_ext.engine import sglang_api, topology
from sgl_ext.engine.serve import cache_flags, priority_flags
from tests.engine.model_families import FAMILIES

pytestmark = pytest.mark.long  # imports SGLang's scheduler
ROOT = Path(__file__).parents[2]
HOPPER, BLACKWELL = 90, 100
MEMORY_MIB = {HOPPER: 81_559, BLACKWELL: 183_359}
SIZES = {"vocab_size": 150_000, "max_position_embeddings": 131_072, "torch_dtype": "bfloat16"}
CACHES = {
    (False, False): "tokens",
    (True, False): "tokens, windows",
    (False, True): "tokens, states",
}


class Chosen(NamedTuple):
    """What SGLang resolved, and the extension's rules for it."""

    args: Any
    model: Any
    rules: list[topology.Rule]

    @property
    def cache(self) -> str:
        """What the tree keeps of a prefix, as the table words it."""
        builder = sglang("mem_cache.kv_cache_builder")
        return CACHES[self.model.is_hybrid_swa, builder.uses_ssm_state(self.model)]

    @property
    def attention(self) -> str:
        overrides = sglang("arg_groups.overrides")
        prefill, decode = overrides.attention_backends_of(self.args)
        assert prefill == decode
        return f"`{decode}`"


def sglang(module: str) -> Any:
    with warnings.catch_warnings(action="ignore"):  # SGLang's, while it is imported
        return import_module(f"sglang.srt.{module}")


@contextmanager
def device(sm: int) -> Iterator[None]:
    """A CUDA device of this compute capability, as far as resolution looks."""
    kind = {"is_hip", "is_npu", "is_xpu", "is_musa", "is_mps", "has_amx", "is_sm110", "is_sm120"}
    capability = divmod(sm, 10)
    facts: dict[str, Any] = dict.fromkeys(kind, False) | {
        "is_cuda": True,
        "has_flashinfer": True,
        "device_sm": sm,
        "device_capability": capability,
        **dict.fromkeys(("is_sm90", "is_hopper_with_cuda_12_3"), sm == HOPPER),
        **dict.fromkeys(("is_sm100", "is_blackwell", "is_sm100_or_sm110"), sm == BLACKWELL),
    }
    # Imports everything that resolution imports, which on a device would be of CUDA.
    sglang("managers.scheduler")
    utils, common = sglang("utils"), sglang("utils.common")
    platform = sglang("platforms.cuda").CudaSRTPlatform()
    quantization = sglang("layers.quantization")
    everywhere = {
        "current_platform": platform,
        "get_device_memory_capacity": lambda device=None: MEMORY_MIB[sm],
    }
    environment = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("sglang.srt"):
                for attribute in everywhere.keys() & vars(module).keys():
                    patch.setitem(vars(module), attribute, everywhere[attribute])
        patch.setattr(sglang("platforms"), "_current_platform", platform)
        # SGLang would take over the log of this process.
        patch.setattr("logging.basicConfig", lambda **_: None)
        patch.setattr(utils, "is_cuda", lambda: True)
        patch.setattr(common, "is_cuda", lambda: True)
        patch.setattr("torch.cuda.get_device_capability", lambda *_: capability)
        # Registered where CUDA is.
        mxfp4 = sglang("layers.quantization.mxfp4").Mxfp4Config
        patch.setitem(quantization.QUANTIZATION_METHODS, "mxfp4", mxfp4)
        try:
            with sglang("runtime_context").override_platform(**facts):
                yield
        finally:
            # Resolution sets variables, for the processes that would follow.
            os.environ.clear()
            os.environ.update(environment)


def chosen(folder: Path, family: str, sm: int, *flags: str) -> Chosen:
    """What an engine of this family on this device would start with, by its flags."""
    server_args = sglang("server_args")
    sglang("arg_groups.pipeline")
    config = FAMILIES[family]
    sizes = {} if "text_config" in config else SIZES
    (folder / "config.json").write_text(json.dumps(sizes | config))
    argv = ["--model-path", str(folder), "--device", "cuda", *flags]
    with device(sm), warnings.catch_warnings(action="ignore"):
        given = server_args.prepare_server_args([*argv, *cache_flags(argv), *priority_flags(argv)])
        facts = topology.facts_of(given)
    assert not topology.refused(facts)
    return Chosen(facts.args, facts.model, topology.degraded(facts))


def rows() -> dict[str, list[str]]:
    """The table of model families in docs/guide/models.md, by family."""
    section = (
        (ROOT / "docs/guide/models.md")
        .read_text()
        .partition("\n## What SGLang chooses for a family\n")[2]
    )
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {row[0]: row[1:] for row in cells}


def both(one: object, other: object) -> str:
    return str(one) if one == other else f"{one}, {other}"


def test_the_page_lists_each_family() -> None:
    assert rows().keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_sglang_chooses_for_a_family_is_what_the_page_says(
    family: str, tmp_path: Path
) -> None:
    hopper, blackwell = (chosen(tmp_path, family, sm) for sm in (HOPPER, BLACKWELL))
    assert rows()[family] == [
        f"`{FAMILIES[family]['architectures'][0]}`",
        both(hopper.args.page_size, blackwell.args.page_size),
        both(hopper.attention, blackwell.attention),
        both(hopper.cache, blackwell.cache),
        "degrades" if hopper.rules else "works",
    ]
    assert hopper.rules == blackwell.rules
    for one, chunk in ((hopper, 8192), (blackwell, 16384)):
        assert not one.args.disable_overlap_schedule
        assert not one.args.disable_radix_cache
        assert one.args.chunked_prefill_size == chunk
        assert one.args.cuda_graph_config.decode.backend == "full"
        assert one.args.radix_cache_backend == topology.CACHE_BACKEND
        assert one.args.radix_eviction_policy == "priority"
        assert one.args.enable_priority_scheduling


@pytest.mark.parametrize("family", FAMILIES)
def test_the_extension_s_cache_serves_each_family(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings(action="ignore"):
        radix_cache = import_module("sgl_ext.engine.scheduler.radix_cache")
    found = chosen(tmp_path, family, HOPPER)
    full = found.model.full_attention_layer_ids
    context = SimpleNamespace(
        is_hybrid_swa=found.model.is_hybrid_swa,
        full_tokens_per_layer=0 if full == [] else 1,
        disable_radix_cache=found.args.disable_radix_cache,
    )
    monkeypatch.setattr(radix_cache, "in_effect", lambda: found.args)
    with monkeypatch.context() as patch:
        for name, made in (
            ("create_unified_radix_cache", lambda _, cache_class: cache_class),
            ("default_radix_cache_factory", lambda _: "SGLang's"),
        ):
            patch.setattr(sglang_api, name, made, raising=False)
        assert radix_cache.make_cache(context) is radix_cache.ExtendedRadixCache


def test_data_parallel_attention_divides_a_chunk_and_has_a_cache_for_each_group(
    tmp_path: Path,
) -> None:
    flags = ("--tp-size", "8", "--dp-size", "8", "--enable-dp-attention")
    found = chosen(tmp_path, "DeepSeek V3", HOPPER, *flags)
    assert (found.args.dp_size, found.args.attn_dp_size) == (1, 8)
    assert found.args.chunked_prefill_size == 8192 // 8
