"""Places for LoRA adapters in a batch: who holds one while SGLang's scheduler admits requests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ext.engine.scheduler import admission, priority
from sgl_ext.engine.scheduler.extension import extension_of
from sgl_ext.engine.scheduler.state import RequestState
from sgl_ext.wire.hints import Hints
from tests.engine.core.test_shared_prefixes import sglang

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang warns while it is imported

PLACES = 2


class Scheduler:
    """Admits as `Scheduler._get_new_batch_prefill_raw` does: it asks whether a request's adapter
    has a place, tries the request, and counts its adapter."""

    def __init__(self, running: list[Any]) -> None:
        pins = SimpleNamespace(now_s=0.0, tokens=0)
        self.tree_cache: Any = SimpleNamespace(
            pins=pins, pressure=None, supports_mamba=lambda: False
        )
        self.batch = SimpleNamespace(reqs=running)
        policy: Any = SimpleNamespace(tree_cache=self.tree_cache, enable_priority_scheduling=False)
        self.begin = partial(priority.order_queue, lambda *_: None, policy)

    def admitted(self, queue: list[Any]) -> list[str]:
        results = sglang("managers.schedule_policy").AddReqResult
        self.begin(queue)
        adder: Any = SimpleNamespace(
            tree_cache=self.tree_cache,
            running_batch=self.batch,
            can_run_list=[],
            new_chunked_req=None,
        )

        def add(adder: Any, req: Any, has_chunked_req: bool) -> Any:
            if not req.fits:
                return results.NO_TOKEN
            adder.can_run_list.append(req)
            return results.CONTINUE

        counted = {req.lora_id for req in self.batch.reqs if not req.finished()}
        for req in queue:
            if admission.count_admitted(has_place, self, req, counted):  # type: ignore[arg-type]
                result = admission.add_one(add, adder, req, has_chunked_req=False)
                counted.add(req.lora_id)
                if result is not results.CONTINUE:
                    break
        return [req.rid for req in adder.can_run_list]


def has_place(scheduler: Any, req: Any, counted: set[str | None]) -> bool:
    """`LoRAManager.validate_lora_batch`."""
    return req.lora_id in counted or len(counted | {req.lora_id}) <= PLACES


def request(name: str, adapter: str | None, *, fits: bool = True, ended: bool = False) -> Any:
    hints = Hints((), (), (), "", "", 0.0, True, False, True)
    return SimpleNamespace(
        rid=name,
        lora_id=adapter,
        fits=fits,
        priority=0,
        finished=lambda: ended,
        sgl_ext=RequestState(hints),
        origin_input_ids=[0] * 100,
        output_ids=[],
        prefix_len=0,
        num_matched_prefix_tokens=0,
        host_hit_length=0,
        host_loaded_length=0,
    )


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Requests share no prefix, and nothing is taken from those that run."""
    monkeypatch.setattr(admission, "must_wait", lambda *_: False)
    monkeypatch.setattr(admission.preemption, "preempt_for_memory", lambda *_: False)
    schedule = {"enable_priority_scheduling": True}
    with sglang("runtime_context").get_context().override_server_args(**schedule):
        yield


def test_a_request_that_others_pass_holds_no_place_for_its_adapter() -> None:
    queue = [request("large", "a", fits=False), request("one", "b"), request("two", "c")]
    assert Scheduler([]).admitted(queue) == ["one", "two"]


def test_one_that_waits_for_a_prefix_holds_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "must_wait", lambda _, adder, req: req.rid == "waits")
    queue = [request("waits", "a"), request("one", "b"), request("two", "c")]
    assert Scheduler([]).admitted(queue) == ["one", "two"]


def test_no_more_adapters_run_than_there_are_places() -> None:
    running = [request("running", None), request("ended", "z", ended=True)]
    queue = [request("large", "a", fits=False), request("one", "b"), request("two", "c")]
    scheduler = Scheduler(running)
    assert scheduler.admitted(queue) == ["one"]
    assert scheduler.admitted([request("with none", None), request("three", "c")]) == [
        "with none",
        "three",
    ]


def test_a_pass_forgets_the_last_one() -> None:
    scheduler = Scheduler([])
    scheduler.admitted([request("large", "a", fits=False)])
    scheduler.batch.reqs = [request("running", "a"), request("more", "b")]
    extension = extension_of(scheduler.tree_cache)
    scheduler.begin([])
    assert extension.adder is None
