"""The ranks of an engine on several machines: what they adopt from the first, what ends them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from sgl_ext.engine.core.folder import engine_name, secret
from sgl_ext.engine.core.hints import attach, decode_hints, is_slice_name, slice_name
from sgl_ext.engine.core.request_context import RequestContext
from sgl_ext.engine.scheduler import nodes
from sgl_ext.engine.scheduler.nodes import NodesDiffer, Terms, adopt, agree, clock_s
from sgl_ext.engine.sglang_types import ResolvedArgs
from sgl_ext.settings.schema import EngineSettings

pytest.importorskip("torch", reason="torch is not installed")

from torch.distributed import HashStore

FIRST = Terms("engine-first", '{"pin_budget":0.5}', {"page_size": "1"}, 1000.0)
SOON = timedelta(seconds=0.05)
LATE = timedelta(seconds=20)


@pytest.fixture(autouse=True)
def _own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is a rank of the second machine, which has a folder of its own."""
    monkeypatch.setenv("SGLEXT_ENGINE_FOLDER", str(tmp_path / "engine-second"))
    for variable in ("SGLEXT_ENGINE_NAME", "SGLEXT_SETTINGS"):
        monkeypatch.setenv(variable, "")  # so that what a test sets is undone
        monkeypatch.delenv(variable)
    monkeypatch.setattr(nodes, "_ahead_s", 0.0)
    secret.cache_clear()
    yield
    secret.cache_clear()


def on_the_first_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SGLEXT_ENGINE_FOLDER", str(tmp_path / FIRST.name))
    secret.cache_clear()


def agreed(*others: Terms, store: HashStore | None = None) -> list[Terms]:
    """What each rank of an engine comes to."""
    store, every = store or HashStore(), (FIRST, *others)
    with ThreadPoolExecutor(len(every)) as pool:
        ranks = [
            pool.submit(agree, store, rank, len(every), own, LATE) for rank, own in enumerate(every)
        ]
        return [rank.result() for rank in ranks]


def test_every_rank_gets_the_terms_of_the_first() -> None:
    second = msgspec.structs.replace(FIRST, name="engine-second", settings="{}")
    assert agreed(second, second) == [FIRST] * 3


def test_a_rank_of_another_machine_believes_the_hints_and_slices_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as first:
        on_the_first_machine(first, tmp_path)
        sliced = slice_name(is_guess=False, is_forced=False)
        request = _Request()
        attach(request, RequestContext(owner="tenant"))  # type: ignore[arg-type]
    secret.cache_clear()
    assert not is_slice_name(sliced)
    assert decode_hints(request.kv_hints) is None
    (_, terms) = agreed(msgspec.structs.replace(FIRST, name="engine-second"))
    adopt(terms, 1000.0)
    assert engine_name() == FIRST.name
    assert is_slice_name(sliced)
    hints = decode_hints(request.kv_hints)
    assert hints is not None
    assert hints.owner == "tenant"


class _Request:
    kv_hints = None


def test_a_rank_of_another_machine_adopts_settings_and_clock() -> None:
    adopt(FIRST, 1500.0)
    assert EngineSettings.from_environment().pin_budget == 0.5
    behind = clock_s()
    adopt(FIRST, 1000.0)
    assert behind - clock_s() == pytest.approx(500.0, abs=5)


def test_the_store_keeps_no_name_that_others_could_read() -> None:
    store = HashStore()
    agreed(FIRST, store=store)
    assert not store.check([nodes._TERMS])


def test_machines_with_other_flags_do_not_serve() -> None:
    other = msgspec.structs.replace(FIRST, alike={"page_size": "16"})
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(agree, store, n, 2, own, LATE) for n, own in enumerate((FIRST, other))]
        for rank in ranks:
            with pytest.raises(NodesDiffer, match="page_size is 1 on the first machine and 16 on"):
                rank.result()


@pytest.mark.parametrize(("rank", "whose"), [(0, "a rank of another machine"), (1, "first rank")])
def test_a_machine_without_the_extension_is_named(rank: int, whose: str) -> None:
    with pytest.raises(NodesDiffer, match=f"{whose} has not answered for 0.05 s: every machine"):
        agree(HashStore(), rank, 2, FIRST, SOON)


def test_a_start_verifies_the_arguments_that_are_compared() -> None:
    assert {*nodes.ALIKE} <= {*ResolvedArgs.__annotations__}
