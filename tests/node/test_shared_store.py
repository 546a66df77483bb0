"""Two balancers on two nodes share a Redis or a PostgreSQL, in front of real engines."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
from sgl_ext_cpu.node import Node, running_balancer

from tests.balancer.store.servers import Postgres, Redis, Server, running
from tests.waiting import HANG_S, until

pytestmark = pytest.mark.long


@pytest.fixture(
    params=[Redis, pytest.param(Postgres, marks=pytest.mark.slow)], ids=["redis", "postgresql"]
)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with running(request.param) as started:
        yield started


class Client:
    """A client of one balancer."""

    def __init__(self, url: str) -> None:
        self.url = url
        once: dict[str, Any] = {"api_key": "any", "max_retries": 0, "timeout": HANG_S}
        self._gpt = openai.OpenAI(base_url=f"{url}/v1", **once)
        self._model = requests.get(f"{url}/v1/models", timeout=HANG_S).json()["data"][0]["id"]

    def ask(self, text: str, previous: str | None = None) -> Any:
        """A turn; one that continues another names it."""
        named = {} if previous is None else {"previous_response_id": previous}
        return self._gpt.responses.create(
            model=self._model, input=text, max_output_tokens=4, **named
        )

    def is_plain_answered(self) -> bool:
        body = {
            "model": self._model,
            "max_tokens": 2,
            "messages": [{"role": "user", "content": "Hello"}],
        }
        return requests.post(f"{self.url}/v1/chat/completions", json=body, timeout=HANG_S).ok

    def close(self) -> None:
        self._gpt.close()


def test_any_balancer_continues_a_response_and_an_outage_costs_no_plain_request(
    node: Node, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE", server.url())
    with contextlib.ExitStack() as stack:

        def begin(name: str) -> tuple[Client, Any]:
            flags = ("--store", "env:STORE")
            started = stack.enter_context(
                running_balancer(node.engines, tmp_path / name / "log", *flags)
            )
            client = Client(started.url)
            stack.callback(client.close)
            return client, started.process

        (one, dying), (two, _) = begin("one"), begin("two")
        first = one.ask("My name is Ann.")
        second = two.ask("What is my name?", first.id)
        assert second.previous_response_id == first.id
        assert second.usage.input_tokens > first.usage.input_tokens + 5
        third = one.ask("And again?", second.id)
        dying.kill()
        fourth = two.ask("Once more?", third.id)
        assert fourth.previous_response_id == third.id

        server.kill()
        assert two.is_plain_answered()
        with pytest.raises(openai.InternalServerError) as caught:
            two.ask("Still there?", fourth.id)
        assert caught.value.status_code == 503
        assert "store of responses and contexts" in str(caught.value)
        assert two.ask("Forget this.").store is False

        server.start()
        found: list[Any] = []

        def continues_and_stores() -> bool:
            with contextlib.suppress(openai.InternalServerError):
                found.append(two.ask("Are you back?", fourth.id))
            return bool(found) and found[-1].store is not False

        until(continues_and_stores)
        three, _ = begin("three")
        last = three.ask("And you?", found[-1].id)
        assert last.previous_response_id == found[-1].id
        assert last.usage.input_tokens > fourth.usage.input_tokens
