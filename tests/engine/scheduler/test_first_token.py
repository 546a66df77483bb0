"""What is done behind a batch's output, in SGLang's own trees, comes to what SGLang does before."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_ext.engine.core.request_context import WHOLE_PROMPT
from sgl_ext.engine.scheduler import first_token
from sgl_ext.engine.scheduler.state import RequestState
from sgl_ext.settings.schema import EngineSettings
from sgl_ext.wire.hints import Hints
from tests.engine.core.test_shared_prefixes import TOKENS, Tree, loaded, sglang
from tests.radix.held import everything

_names = count(1)


class Asked(NamedTuple):
    """A request: its prompt, whether it ends with its first token, and whether it has a mark."""

    ids: list[int]
    ends: bool
    is_marked: bool = False


class Serving(Tree):
    """A tree behind which batches of prompts are computed."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.log: list[str] = []
        store = self.cache.store

        def logged(req: Any, **given: Any) -> None:
            self.log.append("stored")
            store(req, **given)

        self.cache.store = logged

    def begin(self, asked: Asked) -> Any:
        batch = sglang("managers.schedule_batch")
        ids, name = asked.ids, next(_names)
        req = batch.Req(str(name), "", array("q", ids), batch.SamplingParams())
        segments = tuple(hash(tuple(ids[:end])) for end in range(1, len(ids) + 1))
        pins = ((WHOLE_PROMPT, 300.0),) if asked.is_marked else ()
        ends = tuple(range(1, len(ids) + 1))
        hints = Hints(segments, ends, pins, "", "s", 1.0, True, False, True)
        req.sgl_ext = RequestState(hints)
        self.admit(req)
        req.extend_end = len(ids)
        return req

    def end(self, req: Any) -> None:
        req.finished_reason = sglang("managers.schedule_batch").FINISH_LENGTH(0)
        sglang("mem_cache.common").release_kv_cache(req, self.cache, checkpoint=True)

    def run(self, batch: list[Asked], mode: str = "null") -> list[Any]:
        """Computes a batch; those of its requests that go on."""
        reqs = [self.begin(asked) for asked in batch]
        scheduler = SimpleNamespace(
            tree_cache=self.cache,
            enable_hisparse=False,
            disaggregation_mode=SimpleNamespace(value=mode),
            load_publisher=SimpleNamespace(enable=False),
        )
        plan = SimpleNamespace(
            forward_mode=SimpleNamespace(is_extend=lambda: True), is_dllm=lambda: False
        )

        def process(*_: Any) -> None:
            first_token.publish_load_later(lambda _: self.log.append("counted"), scheduler)
            for req, asked in zip(reqs, batch, strict=True):
                if asked.ends:
                    self.end(req)
                else:
                    sglang("mem_cache.common").checkpoint_kv_cache(req, self.cache)
            self.log.append("sent")
            first_token.after_output(None, scheduler)
            self.log.append("reported")

        first_token.send_output_first(process, scheduler, plan, None)
        self.cache.sanity_check()
        return [req for req, asked in zip(reqs, batch, strict=True) if not asked.ends]

    def state(self, running: list[Any]) -> Any:
        """All that the next batch could see, but for where memory lies."""
        cache = self.cache
        return (
            self.memory.available_size(),
            cache.full_evictable_size(),
            cache.full_protected_size(),
            [(req.prefix_len, req.kv.cache_protected_len) for req in running],
            sorted(everything(cache.residency)),
            sorted((pin.prefix, pin.hits, pin.deadline_s) for pin in cache.pins.pins),
        )

    def stored(self, req: Any) -> list[int]:
        """Where the tree has a request's tokens; the request's own row says the same."""
        found = self.cache.path_device_indices(req.last_node).tolist()
        row = self.rows.req_to_token[req.kv.req_pool_idx, : len(req.origin_input_ids)]
        assert row.tolist() == found
        return list(found)


@pytest.fixture(autouse=True)
def _publisher(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    monkeypatch.setattr(loaded("sgl_ext.engine.scheduler.state"), "is_entry_rank", lambda: True)
    monkeypatch.setenv("SGLEXT_ENGINE_FOLDER", str(tmp_path))
    monkeypatch.setenv(*EngineSettings(pin_budget=0.9).to_environment().popitem())
    sglang("arg_groups.pipeline")  # imported here, where its warnings are no errors
    with sglang("runtime_context").get_context().override_server_args():
        yield


GOES_ON = Asked([1, 2, 3], ends=False)


def test_the_output_is_sent_before_a_prompt_is_stored_and_all_is_done_before_sglang_goes_on() -> (
    None
):
    serving = Serving("rust")
    serving.run([GOES_ON, Asked([1, 2, 4], ends=False)])
    assert serving.log == ["sent", "counted", "stored", "stored", "reported"]


def test_a_request_that_ends_is_stored_in_the_order_of_its_batch() -> None:
    serving = Serving("rust")
    serving.run([GOES_ON, Asked([1, 2, 4], ends=True), GOES_ON])
    assert serving.log == ["counted", *["stored"] * 3, "sent", "reported"]


def test_a_prefill_engine_stores_a_prompt_before_it_sends_it_on() -> None:
    serving = Serving("rust")
    serving.run([GOES_ON], mode="prefill")
    assert serving.log == ["counted", "stored", "sent", "reported"]


def test_a_count_that_is_read_at_once_does_not_wait() -> None:
    scheduler: Any = SimpleNamespace(
        tree_cache=SimpleNamespace(), load_publisher=SimpleNamespace(enable=True)
    )
    counted = first_token.publish_load_later(lambda *_, **__: "counted", scheduler, force=True)
    assert counted == "counted"


PROMPT = st.lists(st.sampled_from([1, 2, 7]), min_size=1, max_size=6)
BATCH = st.lists(st.builds(Asked, PROMPT, st.booleans(), st.booleans()), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", ["rust", "python"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(BATCH, max_size=3))
def test_the_tree_its_pins_and_segments_end_as_they_would(
    kind: str, batches: list[list[Asked]]
) -> None:
    ours, theirs = Serving(kind), Serving(kind)
    for batch in batches:
        # `theirs` is of an engine where nothing may wait.
        running, others = ours.run(batch), theirs.run(batch, mode="prefill")
        assert ours.state(running) == theirs.state(others)
        for req in running:
            ours.stored(req)
        for serving, reqs in ((ours, running), (theirs, others)):
            for req in reqs:
                serving.end(req)
        assert ours.state([]) == theirs.state([])
    ours.cache.pins.release(list(ours.cache.pins.pins), "deleted")
    ours.cache.evict(sglang("mem_cache.base_prefix_cache").EvictParams(TOKENS))
    assert ours.memory.available_size() == TOKENS
