"""The tier that engines share, as SGLang's storage threads call it."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

from sgl_ext.engine.tiers import shared_pages
from sgl_ext.settings.schema import SettingsError
from sgl_ext.settings.shared_tier import tier_flags
from tests.engine.tiers.test_host_pages import PAGES, mha, mla, page_of

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang warns while it is imported

PAGE = 2
KEYS = ["a" * 64, "b" * 64, "c" * 64]
ALL = torch.arange(len(KEYS) * PAGE)
Open = Callable[..., Any]


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("weights")
    return tmp_path


@pytest.fixture
def open_tier(root: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens the tier as one rank of an engine does: with these facts, in place of usual ones."""
    from sgl_ext.engine.tiers import shared_pages

    def opened(pool: Any = None, **changed: Any) -> Any:
        arguments = dict.fromkeys(shared_pages._ARGUMENTS, "as usual") | {"lora_paths": None}
        arguments |= {"model_path": str(model)}
        arguments |= {name: changed[name] for name in changed if name in arguments}
        monkeypatch.setattr(shared_pages, "in_effect", lambda: SimpleNamespace(**arguments))
        kinds = ("tp", "pp", "attn_cp")
        ranks = {f"{kind}_rank": 0 for kind in kinds} | {f"{kind}_size": 1 for kind in kinds}
        config = SimpleNamespace(**ranks, is_mla_model=False, model_name="m")
        config.extra_config = {"folder": str(root), "budget_bytes": 1 << 20}
        vars(config).update((k, v) for k, v in changed.items() if k not in arguments)
        tier = shared_pages.SharedPages(config)
        tier.register_mem_pool_host(pool or mha("layer_first", PAGE))
        tier.register_mem_host_pool_v2(pool, "kv")
        opened_tiers.append(tier)
        return tier

    opened_tiers: list[Any] = []
    yield opened
    for tier in opened_tiers:
        tier.close()


def count(result: str) -> float:
    found = REGISTRY.get_sample_value("sgl_ext_shared_tier_pages_total", {"result": result})
    return found or 0.0


def page_file(root: Path, key: str) -> Path:
    (found,) = root.rglob(key)
    return found


def test_one_engine_reads_what_another_one_stored(open_tier: Open) -> None:
    one, other = mha("layer_first", PAGE), mha("layer_first", PAGE)
    writer, reader = open_tier(one), open_tier(other)
    assert reader.batch_exists(KEYS) == 0
    assert writer.batch_set_v1(KEYS[:2], ALL[: 2 * PAGE]) == [True, True]
    assert reader.batch_exists(KEYS) == 2
    to = torch.tensor([n * PAGE + slot for n in (5, 3, 1) for slot in range(PAGE)])
    assert reader.batch_get_v1(KEYS, to) == [True, True, False]
    assert torch.equal(page_of(other, 5), page_of(one, 0))
    assert torch.equal(page_of(other, 3), page_of(one, 1))


def test_pages_are_counted_by_what_became_of_them(open_tier: Open, root: Path) -> None:
    kinds = ("written", "known", "read", "missed", "corrupt", "evicted", "refused")
    before = {kind: count(kind) for kind in kinds}
    tier = open_tier()
    tier.batch_set_v1(KEYS, ALL)
    tier.batch_set_v1(KEYS, ALL)
    tier.batch_get_v1(KEYS, ALL)
    tier.batch_exists([*KEYS, "d" * 64])
    page_file(root, KEYS[1]).write_bytes(b"")
    assert tier.batch_get_v1(KEYS, ALL) == [True, False, False]
    after = {kind: count(kind) - before[kind] for kind in kinds}
    assert after == dict(zip(kinds, (3, 3, 4, 1, 1, 0, 0), strict=True))
    small = open_tier(extra_config={"folder": str(root), "budget_bytes": 2 * (4096 + 1024)})
    small.batch_set_v1(["e" * 64, "f" * 64], ALL[: 2 * PAGE])
    assert count("evicted") - before["evicted"] == 2
    tiny = open_tier(extra_config={"folder": str(root), "budget_bytes": 100})
    assert tiny.batch_set_v1(["g" * 64, "h" * 64], ALL[: 2 * PAGE]) == [False, False]
    assert count("refused") - before["refused"] == 1, "those after it are not tried"


@pytest.mark.parametrize(
    "changed",
    [
        {"model_name": "another"},
        {"tp_size": 2},
        {"tp_rank": 1},
        {"pp_rank": 1},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"chat_template": "another.jinja"},
        {"revision": "another"},
        {"quantization": "fp8"},
        {"pool": lambda: mha("page_first", PAGE)},
        {"pool": lambda: mha("layer_first", 2 * PAGE)},
        {"pool": lambda: mla("layer_first", PAGE)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_engines_that_are_not_alike_share_nothing(open_tier: Open, changed: dict[str, Any]) -> None:
    open_tier().batch_set_v1(KEYS, ALL)
    assert open_tier().batch_exists(KEYS) == len(KEYS)
    made = {name: value() if callable(value) else value for name, value in changed.items()}
    assert open_tier(**made).batch_exists(KEYS) == 0


def test_weights_that_changed_in_place_are_another_model(open_tier: Open, model: Path) -> None:
    open_tier().batch_set_v1(KEYS, ALL)
    (model / "model.safetensors").write_text("other weights")
    assert open_tier().batch_exists(KEYS) == 0


def test_ranks_of_multi_head_latent_attention_share_their_pages(open_tier: Open) -> None:
    pool = mla("layer_first", PAGE)
    open_tier(pool, is_mla_model=True, tp_size=2).batch_set_v1(KEYS, ALL)
    other = open_tier(mla("layer_first", PAGE), is_mla_model=True, tp_size=2, tp_rank=1)
    assert other.batch_exists(KEYS) == len(KEYS)


def test_a_model_with_pools_beside_keys_and_values_is_refused(open_tier: Open) -> None:
    tier = open_tier()
    tier.register_mem_host_pool_v2(mha("layer_first", PAGE), "kv")
    with pytest.raises(SettingsError, match=r"^--hicache-storage-backend: pool mamba: "):
        tier.register_mem_host_pool_v2(mha("layer_first", PAGE), "mamba")


def test_the_end_of_a_prefix_is_evicted_before_its_beginning(open_tier: Open, root: Path) -> None:
    """In whatever order they were stored: without its beginning the rest is of no use."""
    keys = [f"{number:064x}" for number in range(PAGES)]
    slots = torch.arange(PAGES * PAGE)
    room = {"folder": str(root), "budget_bytes": PAGES * (4096 + 1024)}
    tier = open_tier(extra_config=room)
    tier.batch_set_v1(keys[:3], slots[: 3 * PAGE])
    tier.batch_set_v1(keys[3:], slots[3 * PAGE :], SimpleNamespace(prefix_keys=keys[:3]))
    for number, other in enumerate(("x" * 64, "y" * 64), start=1):
        tier.batch_set_v1([other], slots[:PAGE])
        assert tier.batch_exists(keys) == PAGES - number


def test_an_engine_that_reads_the_rest_keeps_the_beginning(open_tier: Open, root: Path) -> None:
    tier = open_tier()
    tier.batch_set_v1(KEYS, ALL)
    for key in KEYS:
        page_file(root, key).touch()
    old = page_file(root, KEYS[0])
    os.utime(old, ns=(1, 1))
    tier.batch_exists(KEYS[2:], SimpleNamespace(prefix_keys=KEYS[:2]))
    assert old.stat().st_mtime_ns > page_file(root, KEYS[1]).stat().st_mtime_ns > 1


def test_weights_that_change_while_serving_end_the_tier(open_tier: Open) -> None:
    tier = open_tier()
    tier.batch_set_v1(KEYS, ALL)
    shared_pages.retire(None, None)
    assert tier.batch_exists(KEYS) == 0
    assert tier.batch_get_v1(KEYS, ALL) == [False] * 3
    assert tier.batch_set_v1(["d" * 64], ALL[:PAGE]) == [False]
    assert open_tier().batch_exists(KEYS) == 3, "a restarted engine is not concerned"


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"folder": "/x"}, "budget_bytes"),
        ({"folder": "/x", "budget_bytes": 0}, "budget_bytes"),
        ({"budget_bytes": 1}, 'no "folder"'),
        ({"folder": "/x", "budget_bytes": 1, "bugdet": 1}, "bugdet"),
        ({"folder": "/x", "budget_bytes": 1, "interface_v1": 0}, "interface_v1"),
    ],
    ids=str,
)
def test_a_wrong_configuration_is_named(
    open_tier: Open, extra: dict[str, Any], problem: str
) -> None:
    with pytest.raises(SettingsError, match=problem):
        open_tier(extra_config=extra)


def test_sglang_accepts_what_the_launcher_gives_it(
    open_tier: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    open_tier()  # the facts of an engine
    flags = tier_flags(1 << 20)
    raw = flags[flags.index("--hicache-storage-backend-extra-config") + 1]
    extra, *_, passes_prefix = HybridCacheController.parse_storage_backend_extra_config(raw)
    assert passes_prefix
    monkeypatch.setenv("SGLEXT_SHARED_TIER", str(root))
    config: Any = SimpleNamespace(extra_config=extra)
    made = StorageBackendFactory.create_backend("dynamic", config, None)
    assert type(made).__name__ == "SharedPages"
    assert json.loads(raw)["budget_bytes"] == 1 << 20


# Faults


def off(why: str) -> float:
    return REGISTRY.get_sample_value("sgl_ext_shared_tier_off", {"why": why}) or 0.0


def failing(code: int) -> Callable[..., Any]:
    def call(*_: object, **__: object) -> Any:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize(
    ("call", "code", "why"),
    [("writev", errno.ENOSPC, "full"), ("writev", errno.EIO, "failing")],
)
def test_a_disk_that_takes_no_page_turns_the_tier_off_by_name_for_a_minute(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch, call: str, code: int, why: str
) -> None:
    tier, clock = open_tier(), [1000.0]
    monkeypatch.setattr(shared_pages.time, "monotonic", lambda: clock[0])
    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing(code))
        assert not any(tier.batch_set_v1(KEYS[:1], ALL[:PAGE]))
    assert tier.switch.why == why
    assert off(why) == 1
    assert not any(tier.batch_set_v1(KEYS, ALL)), "it is not tried at once"
    clock[0] += 61
    assert all(tier.batch_set_v1(KEYS, ALL))
    assert tier.switch.why is None
    assert off(why) == 0


def test_a_disk_that_cannot_be_read_is_a_miss_and_turns_the_tier_off(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, clock = open_tier(), [1000.0]
    monkeypatch.setattr(shared_pages.time, "monotonic", lambda: clock[0])
    tier.batch_set_v1(KEYS, ALL)
    with monkeypatch.context() as patched:
        patched.setattr(os, "readv", failing(errno.EIO))
        assert tier.batch_get_v1(KEYS, ALL) == [False] * 3
    assert off("failing") == 1
    assert tier.batch_exists(KEYS) == 0
    assert tier.batch_get_v1(KEYS, ALL) == [False] * 3
    clock[0] += 61
    assert tier.batch_exists(KEYS) == 3
    assert tier.batch_get_v1(KEYS, ALL) == [True] * 3
    assert off("failing") == 0


# Leases


class Tree:
    """A tree core with one prefix."""

    def get_prefix_hash_values(self, node: int) -> list[str]:
        return KEYS[: node - 1]

    def get_hash_values(self, node: int) -> list[str]:
        return [KEYS[node - 1]]


def test_the_pages_of_a_pin_outlive_a_flood_as_long_as_its_lease(
    open_tier: Open, root: Path
) -> None:
    budget = {"folder": str(root), "budget_bytes": 4 * (4096 + 1024)}
    tier = open_tier(extra_config=budget)
    tier.keep(Tree(), 2, 3600.0)  # before its pages are written
    tier.batch_set_v1(KEYS[:2], ALL[: 2 * PAGE])
    for number in range(8):
        assert tier.batch_set_v1([f"{number}" * 64], ALL[:PAGE]) == [True]
        assert tier.batch_exists(KEYS[:2]) == 2
    again = open_tier(extra_config=budget)  # the engine was restarted
    for number in range(8):
        again.batch_set_v1([f"{number}x" * 32], ALL[:PAGE])
    assert again.batch_exists(KEYS[:2]) == 2


def test_leases_that_wait_for_their_pages_are_bounded_and_counted(open_tier: Open) -> None:
    name = "sgl_ext_shared_tier_leases_dropped_total"
    tier, before = open_tier(), REGISTRY.get_sample_value(name) or 0.0
    for _ in range(shared_pages._MOST_LEASES + 3):
        tier.keep(Tree(), 3, 3600.0)
    assert REGISTRY.get_sample_value(name) == before + 3
    tier.batch_set_v1(KEYS, ALL)
    tier.keep(Tree(), 3, 3600.0)
    assert REGISTRY.get_sample_value(name) == before + 3


# Tenants


def chain(tokens: list[int], extra_key: str | None, salt: str | None) -> list[str]:
    """SGLang's names of a prompt's pages."""
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    key = RadixKey(array("q", tokens), extra_key, cache_salt=salt)
    hashes: list[str] = get_storage_hash_str(key, None, page_size=PAGE)
    rest = RadixKey(array("q", [7] * PAGE), extra_key, cache_salt=salt)
    return hashes + get_storage_hash_str(rest, hashes[-1], page_size=PAGE)


def test_tenants_and_adapters_have_pages_of_their_own_from_the_first_to_a_continued_one() -> None:
    """SGLang starts a chain of hashes with the name space, and continues it from its last hash."""
    parts = (None, "a", "b", "ab")
    spaces = [(extra_key, salt) for extra_key in parts for salt in parts]
    names = [name for space in spaces for name in chain([1, 2, 3, 4], *space)]
    assert len({*names}) == len(names) == 3 * len(spaces)
    assert chain([1, 2, 3, 4], "a", "b") == chain([1, 2, 3, 4], "a", "b")


def test_sglang_hashes_no_token_that_a_shared_prefix_puts_into_the_tree() -> None:
    """So `--shared-prefixes` is refused with host copies: see sgl_ext.engine.topology."""
    with pytest.raises(IndexError, match=r"non-negative|does not fit in uint32"):
        chain([1, 2, -5, 4], None, None)
