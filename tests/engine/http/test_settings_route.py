"""Settings that a balancer changes in a running engine: each part of its HTTP process uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import zmq
from starlette.applications import Starlette
from starlette.testclient import TestClient

from sgl_ext.engine.http.extension import HttpExtension
from sgl_ext.engine.http.routes import settings_route
from sgl_ext.engine.prefill_ahead.prefiller import Prefiller
from sgl_ext.engine.scheduler.extension import SchedulerExtension
from sgl_ext.settings.fields import fields_of
from sgl_ext.settings.schema import EngineSettings
from sgl_ext.wire.orders import SETTINGS_PATH

Extend = Callable[..., HttpExtension]


class Outbox:
    """Keeps what would be sent to the scheduler."""

    def __init__(self) -> None:
        self.sent: list[Mapping[str, Any]] = []
        self.is_full = False

    def change(self, settings: Mapping[str, Any]) -> None:
        if self.is_full:
            raise zmq.Again
        self.sent.append(settings)


class Served:
    def __init__(self, extension: HttpExtension) -> None:
        self.extension, self.outbox = extension, Outbox()
        self.second = Outbox()  # of a second data-parallel rank
        route = settings_route(extension, [self.outbox, self.second])  # type: ignore[list-item]
        self._client = TestClient(Starlette(routes=[route]))

    def post(self, number: int, content_type: str = "application/json", **values: Any) -> Any:
        body = orjson.dumps({"number": number, "values": values})
        return self._client.post(
            SETTINGS_PATH, content=body, headers={"content-type": content_type}
        )


@pytest.fixture
def served(extend: Extend) -> Served:
    return Served(extend())


class Pins:
    """A cache whose pins are limited by settings."""

    pins = None

    def __init__(self) -> None:
        self.budget = 1.0

    def limit_pins(self, settings: EngineSettings) -> None:
        self.budget = settings.pin_budget


# What reads each setting that changes: of the HTTP process, of the scheduler, or both.
HTTP, SCHEDULER = "http", "scheduler"
_READ_BY = {
    "max_priority": HTTP,
    "aging_s": SCHEDULER,
    "preemption_threshold": SCHEDULER,
    "pin_budget": SCHEDULER,
    "host_pin_budget": SCHEDULER,
    "pin_owner_share": SCHEDULER,
    "pin_ttl_s": HTTP,
    "pin_max_ttl_s": HTTP,
    "pin_unmarked_ttl_s": HTTP,
    "preemption_grace_s": SCHEDULER,
    "prefill_ahead": HTTP,
    "prefill_ahead_slice_tokens": HTTP,
    "prefill_ahead_evictable_share": SCHEDULER,
}
_OTHER: dict[str, Any] = {
    "max_priority": 7,
    "aging_s": 3.0,
    "preemption_threshold": 4,
    "pin_budget": 0.1,
    "host_pin_budget": 0.2,
    "pin_owner_share": 0.5,
    "pin_ttl_s": 20.0,
    "pin_max_ttl_s": 40.0,
    "pin_unmarked_ttl_s": 10.0,
    "preemption_grace_s": 1.0,
    "prefill_ahead": "hinted",
    "prefill_ahead_slice_tokens": 64,
    "prefill_ahead_evictable_share": 0.1,
    "tenants": [{"name": "people", "max_priority": 9, "weight": 3.0, "pin_share": 0.2}],
}


def test_each_setting_of_an_engine_that_changes_is_tested() -> None:
    reloads = {n for n, field in fields_of(EngineSettings).items() if field.reload.applies}
    assert reloads == _READ_BY.keys()
    assert _OTHER.keys() == {*reloads, "tenants"}


def test_the_http_process_uses_what_was_changed(served: Served) -> None:
    args: Any = SimpleNamespace(
        page_size=1, chunked_prefill_size=0, dp_size=1, attn_dp_size=1, dcp_size=1
    )
    prefiller = Prefiller(args, args, 2048)
    served.extension.next_turns = SimpleNamespace(policy="auto", prefiller=prefiller)  # type: ignore[assignment]
    answer = served.post(5, **_OTHER)
    assert (answer.status_code, answer.json()) == (200, {"applied": True, "why": ""})
    extension = served.extension
    assert extension.settings_number == 5
    limits = extension.settings.ttl_limits
    assert (limits.default_s, limits.max_s, limits.unmarked_s) == (20.0, 40.0, 10.0)
    assert extension.tenants.of("people").max_priority == 9
    assert extension.tenants.of("x").max_priority == 7
    assert extension.next_turns is not None
    assert extension.next_turns.policy == "hinted"
    assert prefiller._max_slice_tokens == prefiller._slice_tokens == 64
    assert served.outbox.sent == [_OTHER]


def test_the_scheduler_uses_what_was_changed() -> None:
    cache: Any = Pins()
    extension = SchedulerExtension(cache)
    assert extension.weights == {}
    extension.change(_OTHER)
    for name, reader in _READ_BY.items():
        if reader == SCHEDULER:
            assert getattr(extension.settings, name) == _OTHER[name]
    assert extension.weights == {"people": 3.0}
    assert cache.budget == 0.1


def test_an_older_version_changes_nothing(served: Served) -> None:
    served.post(5, aging_s=2)
    assert served.post(5, aging_s=3).status_code == served.post(4, aging_s=4).status_code == 200
    assert served.extension.settings.aging_s == 2
    assert served.outbox.sent == [{"aging_s": 2}]


def test_a_wrong_value_is_400_and_changes_nothing(served: Served) -> None:
    answer = served.post(5, aging_s=2, pin_budget=3)
    assert answer.status_code == 400
    assert "pin_budget" in answer.json()["error"]["message"]
    assert (served.extension.settings_number, served.outbox.sent) == (0, [])


def test_a_web_page_changes_nothing(served: Served) -> None:
    assert served.post(5, content_type="text/plain", aging_s=2).status_code == 415
    assert served.extension.settings_number == 0


def test_every_rank_gets_the_settings(served: Served) -> None:
    assert served.post(5, pin_budget=0.1).json() == {"applied": True, "why": ""}
    assert served.outbox.sent == served.second.sent == [{"pin_budget": 0.1}]


def test_ranks_that_no_order_reaches_are_named(extend: Extend) -> None:
    route = settings_route(extend(), [], "its ranks on other nodes keep them")
    client = TestClient(Starlette(routes=[route]))
    answer = client.post(SETTINGS_PATH, json={"number": 5, "values": {"pin_budget": 0.1}})
    assert answer.json() == {"applied": False, "why": "its ranks on other nodes keep them"}


def test_an_order_that_the_scheduler_does_not_take_is_sent_again(served: Served) -> None:
    served.outbox.is_full = True
    assert served.post(5, aging_s=2).status_code == 503
    served.outbox.is_full = False
    assert served.post(5, aging_s=2).status_code == 200
    assert served.outbox.sent == [{"aging_s": 2}]
