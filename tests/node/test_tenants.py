"""Tenants with keys in front of a real engine: nobody reads what another one has in the cache."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import requests
from sgl_ext_cpu.node import Node, StartNode

from sgl_ext import keys
from tests.waiting import until

MESSAGES, CHAT, RESPONSES = "/v1/messages", "/v1/chat/completions", "/v1/responses"
_WORDS = ("the", "agent", "reads", "a", "file", "and", "writes", "what", "it", "found")
_COLD = 40
"""More than a template begins every prompt with."""
LISTED = " ".join(random.Random(0).choice(_WORDS) for _ in range(300))
"""What the operator has all tenants share, as a system prompt."""
_CHANCE = 8
"""With fewer tokens than this two texts may begin alike."""
_fresh = count(1)
Body = Callable[[str], dict[str, Any]]


class Office:
    """A node, and the keys of three tenants of it: alice, bob, and root, who is an admin."""

    def __init__(self, node: Node, path: Path, held: dict[str, str]) -> None:
        self.node = node
        self.path = path
        self.keys = held

    def ask(
        self, who: str, method: str, path: str, body: Any = None, **headers: str
    ) -> requests.Response:
        said = {"authorization": f"Bearer {self.keys[who]}", **headers}
        return requests.request(method, self.node.url + path, json=body, headers=said, timeout=300)

    def cached(self, who: str, path: str, body: dict[str, Any], **headers: str) -> int:
        """How many tokens of a prompt its tenant is told were cached."""
        answer = self.ask(who, "POST", path, body, **headers)
        assert answer.ok, answer.text
        told = answer.json()
        if path == "/generate":
            return int(told["meta_info"]["cached_tokens"])
        usage = told["usage"]
        if path == MESSAGES:
            return int(usage["cache_read_input_tokens"])
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)


@pytest.fixture(scope="module")
def office(start_node: StartNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    """One engine behind a balancer that knows its callers by their keys."""
    folder = tmp_path_factory.mktemp("tenants")
    path = folder / "keys.toml"
    path.write_text("[tenants.root]\nadmin = true\n[tenants.slow]\nrequests_per_minute = 1\n")
    held = {who: keys.add_key(path, who)[0] for who in ("alice", "bob", "root", "slow", "mate")}
    log = folder / "requests.jsonl"
    flags = ("--instances", "1", "--keys", str(path), "--request-log", str(log))
    groups = ("--tenant", "bob:cache_group=team", "--tenant", "mate:cache_group=team")
    share = folder / "share.jsonl"
    share.write_text(json.dumps(message(LISTED, messages=[])))
    flags += ("--shared-prefixes", str(share))
    with start_node(folder / "logs", *flags, *groups) as node:
        yield Office(node, path, held)


def text(words: int = 300) -> str:
    """A text that nobody sent before."""
    source = random.Random(next(_fresh))
    return " ".join(source.choice(_WORDS) for _ in range(words))


def message(prompt: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "max_tokens": 1,
        "system": [{"type": "text", "text": prompt}],
        "messages": [{"role": "user", "content": "Go on."}],
        **more,
    }


def pinned(prompt: str) -> dict[str, Any]:
    mark = {"type": "ephemeral", "ttl": "1h"}
    return message(prompt, system=[{"type": "text", "text": prompt, "cache_control": mark}])


def chat(prompt: str, **more: Any) -> dict[str, Any]:
    told = [{"role": "system", "content": prompt}, {"role": "user", "content": "Go on."}]
    return {"model": "tiny", "max_tokens": 1, "messages": told, **more}


def response(prompt: str) -> dict[str, Any]:
    return {
        "model": "tiny",
        "max_output_tokens": 1,
        "input": prompt,
        "prompt_cache_key": "the same",
        "store": False,
    }


def batch_of_one(prompt: str) -> dict[str, Any]:
    return {"text": prompt, "sampling_params": {"max_new_tokens": 1}, "cache_salt": "x"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (MESSAGES, message),
        (MESSAGES, pinned),
        (CHAT, lambda prompt: chat(prompt, prompt_cache_key="the same")),
        (CHAT, lambda prompt: chat(prompt, extra_key="k", cache_salt="s")),
        (RESPONSES, response),
        ("/generate", batch_of_one),
    ],
)
def test_nobody_reads_what_another_tenant_has_cached(office: Office, path: str, body: Body) -> None:
    prompt = text()
    assert office.cached("alice", path, body(prompt)) < _COLD
    assert office.cached("bob", path, body(prompt)) < _COLD
    assert office.cached("root", path, body(prompt)) < _COLD
    assert office.cached("alice", path, body(prompt)) > 200
    assert office.cached("bob", path, body(prompt)) > 200


@pytest.mark.parametrize(
    "forged",
    [
        {"cache_salt": "5:alice"},
        {"extra_key": "5:alice"},
        {"cache_salt": "alice", "extra_key": "alice"},
        {"cache_salt": "sgl_ext-shared-guess-300:5:alice"},
        {"cache_salt": ""},
    ],
)
def test_no_field_opens_the_name_space_of_another(office: Office, forged: dict[str, str]) -> None:
    prompt = text()
    office.cached("alice", CHAT, chat(prompt))
    said = {"x-tenant-id": "alice", "x-sgl-ext-cache-group": "alice"}
    assert office.cached("bob", CHAT, chat(prompt, **forged), **said) < _COLD


def shared_by(office: Office, ask: Callable[[], int]) -> tuple[int, int]:
    """Of a request, how many tokens were cached and how many were of the listed prompt."""
    counted = "sgl_ext_shared_prefix_tokens_total"
    before = office.node.metric(counted)
    return ask(), int(office.node.metric(counted) - before)


def test_what_the_operator_lists_is_there_before_anybody_asks(office: Office) -> None:
    done = "sgl_ext_prefilled_ahead_tokens_total"
    until(lambda: office.node.metric(done) > 200)
    cached, listed = shared_by(office, lambda: office.cached("bob", MESSAGES, message(LISTED)))
    assert cached == listed > 200


def templated(prompt: str, **more: Any) -> dict[str, Any]:
    return {
        "text": f"<|im_start|>system\n{prompt}",
        "sampling_params": {"max_new_tokens": 1},
        **more,
    }


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (MESSAGES, message),
        (MESSAGES, pinned),
        (CHAT, chat),
        (RESPONSES, lambda prompt: {**response("Go on."), "instructions": prompt}),
        ("/generate", templated),
    ],
)
def test_tenants_share_what_is_listed_and_nothing_behind_it(
    office: Office, path: str, body: Body
) -> None:
    prompt = f"{LISTED} {text()}"
    office.cached("mate", path, body(LISTED))
    for who in ("alice", "root"):
        cached, listed = shared_by(office, lambda who=who: office.cached(who, path, body(prompt)))
        assert 200 < listed <= cached < listed + _CHANCE
    assert office.cached("alice", path, body(prompt)) > listed + 200
    assert listed <= office.cached("bob", path, body(prompt)) < listed + _CHANCE
    assert office.cached("mate", path, body(prompt)) > listed + 200, "of bob's group"


def test_each_prompt_of_a_batch_shares_what_is_listed_of_it(office: Office) -> None:
    office.cached("alice", "/generate", templated(LISTED))
    prompts = [f"{LISTED} {text()}", text()]
    batch = {**templated(""), "text": [f"<|im_start|>system\n{one}" for one in prompts]}
    answers = office.ask("bob", "POST", "/generate", batch).json()
    first, second = (one["meta_info"]["cached_tokens"] for one in answers)
    assert first > 200
    assert second < _COLD
    assert office.cached("bob", "/generate", templated(prompts[0], cache_salt="x")) < _COLD


def test_an_answer_is_the_same_whether_its_prompt_is_shared(office: Office) -> None:
    prompt = chat(f"{LISTED} {text(50)}", max_tokens=30, temperature=0)

    def answered(who: str, **more: str) -> tuple[int, str]:
        told = office.ask(who, "POST", CHAT, {**prompt, **more}).json()
        cached = (told["usage"]["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"]
        return cached, told["choices"][0]["message"]["content"]

    office.cached("mate", CHAT, chat(LISTED))
    cold, alone = answered("alice", cache_salt="apart")
    warm, shared = answered("alice")
    assert cold < _COLD < 200 < warm
    assert shared == alone


def test_what_is_prefilled_behind_a_listed_prompt_is_its_tenants(office: Office) -> None:
    prompt = f"{LISTED} {text()}"
    answer = office.ask("alice", "POST", "/v1/prefill?protocol=messages", message(prompt))
    assert answer.json()["complete"], answer.text
    cached, listed = shared_by(office, lambda: office.cached("bob", MESSAGES, message(prompt)))
    assert 200 < listed <= cached < listed + _CHANCE
    assert office.cached("alice", MESSAGES, message(prompt)) > listed + 200


def test_only_an_admin_speaks_for_another_and_a_group_shares(office: Office) -> None:
    prompt = text()
    office.cached("alice", CHAT, chat(prompt))
    assert office.cached("root", CHAT, chat(prompt), **{"x-tenant-id": "alice"}) > 200
    assert office.cached("bob", CHAT, chat(prompt)) < _COLD
    assert office.cached("mate", CHAT, chat(prompt)) > 200


def test_pins_are_seen_and_given_up_by_their_owner(office: Office) -> None:
    prompt = text()
    office.cached("alice", MESSAGES, pinned(prompt), **{"x-session-id": "mine"})

    def seen(who: str) -> list[str]:
        rows = office.ask(who, "GET", "/v1/pins").json()["pins"]
        return [row["prefix"] for row in rows if row["session"] == "mine"]

    until(lambda: len(seen("alice")) == 1)
    assert seen("bob") == []
    assert seen("root") == seen("alice")
    (prefix,) = seen("alice")

    def gone(who: str, query: str) -> int:
        (answer,) = office.ask(who, "DELETE", f"/v1/pins?{query}").json().values()
        return int(answer["deleted"])

    assert gone("bob", f"prefix={prefix}") == gone("bob", "session=mine") == 0
    ending = {"x-session-id": "mine", "x-sgl-ext-session-final": "true"}
    office.cached("bob", MESSAGES, message(text()), **ending)
    assert seen("alice") == [prefix]
    assert gone("alice", "session=mine") == 1
    until(lambda: seen("alice") == [])


def test_what_is_prefilled_ahead_is_its_tenants(office: Office) -> None:
    prompt = text()
    answer = office.ask("alice", "POST", "/v1/prefill?protocol=messages", message(prompt))
    assert answer.json()["complete"], answer.text
    assert office.cached("bob", MESSAGES, message(prompt)) < _COLD
    assert office.cached("alice", MESSAGES, message(prompt)) > 200


def test_what_is_guessed_is_its_tenants(office: Office) -> None:
    ahead, judged = "sgl_ext_prefills_ahead_total", "sgl_ext_next_turns_guessed_total"
    begun, known = office.node.metric(ahead), office.node.metric(judged)
    plain = {"chat_template_kwargs": {"enable_thinking": False}}
    asks = {"nvext": {"agent_hints": {"speculative_prefill": True}}, "regex": "[a-z]{6,9}"}
    first = chat(text(), **asks, **plain, max_tokens=200)
    said = office.ask("alice", "POST", CHAT, first).json()["choices"][0]["message"]["content"]
    until(lambda: office.node.metric(ahead) > begun)
    turn = [{"role": "assistant", "content": said or ""}, {"role": "user", "content": "Then?"}]
    second = {**chat(""), **plain, "messages": [*first["messages"], *turn]}
    assert office.cached("bob", CHAT, second) < _COLD
    assert office.node.metric(judged) == known
    assert office.cached("alice", CHAT, second) > 200
    assert office.node.metric(judged) == known + 1


def test_administration_is_not_for_tenants(office: Office) -> None:
    for method, path in (
        ("POST", "/flush_cache"),
        ("GET", "/metrics"),
        ("GET", "/sgl_ext/workers"),
    ):
        assert office.ask("alice", method, path).status_code == 403
    assert office.ask("root", "POST", "/flush_cache").ok
    shown = office.ask("root", "POST", f"/sgl_ext/explain{CHAT}", chat(text()))
    assert shown.json()["segments"] > 0


def test_the_balancer_knows_what_each_tenant_has_and_where(office: Office) -> None:
    prompt = text()
    office.cached("alice", CHAT, chat(prompt))

    def held(who: str) -> int:
        answer = office.ask(
            "root", "POST", f"/sgl_ext/explain{CHAT}", chat(prompt), **{"x-tenant-id": who}
        )
        (worker,) = answer.json()["workers"]
        return int(worker["held_tokens"])

    until(lambda: held("alice") > 200)
    assert held("bob") == held("nobody") == 0


def test_limits_and_keys_hold_while_the_node_runs(office: Office) -> None:
    assert office.ask("slow", "POST", CHAT, chat("a")).ok
    refused = office.ask("slow", "POST", MESSAGES, message("a"))
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(refused.headers["retry-after"]) <= 60

    office.keys["new"], name = keys.add_key(office.path, "new")
    until(lambda: office.ask("new", "POST", CHAT, chat("a")).ok)
    keys.revoke_key(office.path, name)
    until(lambda: office.ask("new", "GET", "/v1/models").status_code == 401)


def test_no_key_was_written_anywhere(office: Office) -> None:
    logs = [path for path in office.path.parent.rglob("*") if path.is_file()]
    assert {"balancer.log", "requests.jsonl", "engine-0.log"} <= {path.name for path in logs}
    for path in logs:
        written = path.read_bytes()
        assert not any(key.encode() in written for key in office.keys.values()), path.name


def charged(office: Office, who: str) -> float:
    page = office.ask("root", "GET", "/metrics").text
    name = f'sgl_ext_tenant_tokens_total{{tenant="{who}"}} '
    return sum(float(li.removeprefix(name)) for li in page.splitlines() if li.startswith(name))


def words(chunks: list[dict[str, Any]]) -> str:
    """What a stream says: how its tokens share events depends on the time."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    parts = [choice.get("delta") or choice for choice in choices]
    names = ("reasoning_content", "content", "text")
    return "".join(part.get(name) or "" for part in parts for name in names)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_stream_is_charged_for_a_usage_that_its_client_does_not_see(
    office: Office, path: str
) -> None:
    prompt = text()
    body: dict[str, Any] = chat(prompt) if path == CHAT else {"model": "tiny", "prompt": prompt}
    body |= {"max_tokens": 8, "stream": True, "temperature": 0}
    before = charged(office, "alice")
    plain = office.ask("alice", "POST", path, body).text.split("\n\n")
    cost = charged(office, "alice") - before
    asking = body | {"stream_options": {"include_usage": True}}
    full = office.ask("alice", "POST", path, asking).text.split("\n\n")
    assert plain[-2:] == full[-2:] == ["data: [DONE]", ""]
    usage = json.loads(full[-3].removeprefix("data: "))["usage"]
    assert not any('"choices":[]' in event for event in plain)
    seen, expected = (
        [json.loads(event.removeprefix("data: ")) for event in events]
        for events in (plain[:-2], full[:-3])
    )
    assert words(seen) == words(expected)
    assert {key for chunk in seen for key in chunk} == {key for c in expected for key in c}
    assert all(chunk.get("usage") is None for chunk in seen)
    longest = usage["prompt_tokens"] + usage["completion_tokens"]
    assert longest - _COLD <= cost <= longest


def test_a_list_of_prompts_is_charged_for_all_of_them(office: Office) -> None:
    for stream in (False, True):
        before = charged(office, "alice")
        sampling = {"max_new_tokens": 3, "temperature": 0}
        prompts = {"text": [text(), text(), "Hi"], "sampling_params": sampling, "stream": stream}
        answer = office.ask("alice", "POST", "/generate", prompts).text
        lines = answer.split("\n\n")[:-2] if stream else [answer]
        items = [json.loads(line.removeprefix("data: ")) for line in lines]
        rows = {row["index"]: row for row in items} if stream else dict(enumerate(items[0]))
        counts = [row["meta_info"] for row in rows.values()]
        assert len(counts) == 3
        assert charged(office, "alice") - before == sum(
            one["prompt_tokens"] - one["cached_tokens"] + one["completion_tokens"] for one in counts
        )
