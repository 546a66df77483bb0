"""What the operator lists is once in SGLang's own trees, and what is behind it is one group's."""

from __future__ import annotations

import random
import warnings
from array import array
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_ext.engine.core import counters, shared_prefixes
from sgl_ext.engine.core.folder import secret
from sgl_ext.engine.core.hints import slice_name
from sgl_ext.engine.core.request_context import WHOLE_PROMPT, DryRun, RequestContext
from sgl_ext.engine.core.request_names import is_whole_group, isolate, salted
from sgl_ext.engine.prefill_ahead import service
from sgl_ext.engine.scheduler import admission
from sgl_ext.engine.scheduler.admission import FOLLOW_TOKENS
from sgl_ext.engine.scheduler.state import RequestState
from sgl_ext.settings.schema import EngineSettings
from sgl_ext.wire.hints import Hints

TOKENS = 1000
GROUPS = ("alice", "bob")
_names = count(1)


def loaded(module: str) -> Any:
    with warnings.catch_warnings(action="ignore"):  # SGLang's, while it is imported
        return import_module(module)


def sglang(module: str) -> Any:
    return loaded(f"sglang.srt.{module}")


@pytest.fixture(autouse=True, scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """SGLang's keys made as in a scheduler."""
    kind = sglang("mem_cache.radix_cache").RadixKey
    original = kind.__init__

    def hooked(*args: Any, **given: Any) -> None:
        shared_prefixes.make_key(original, *args, **given)

    def forget() -> None:
        for remembered in (
            secret,
            shared_prefixes._read,
            shared_prefixes.prefixes,
        ):
            remembered.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLEXT_ENGINE_FOLDER", str(tmp_path_factory.mktemp("engine")))
        patch.setattr(kind, "__init__", hooked)
        forget()
        yield
    forget()


class Tree:
    """A tree of SGLang's, filled and asked without an engine."""

    def __init__(self, kind: str, page: int = 1, is_eagle: bool = False, **more: Any) -> None:
        torch, half = import_module("torch"), import_module("torch").float16
        pools = sglang("mem_cache.memory_pool")
        self.page, self.is_eagle = page, is_eagle
        self.rows = pools.ReqToTokenPool(8, TOKENS, "cpu", enable_memory_saver=False)
        pool = pools.MHATokenToKVPool(TOKENS, page, half, 1, 2, 1, "cpu", enable_memory_saver=False)
        allocator = sglang("mem_cache.allocator.token").TokenToKVPoolAllocator
        self.memory = allocator(TOKENS, half, "cpu", pool, need_sort=False)
        parts = sglang("mem_cache.unified_cache.component_type").ComponentType
        params = sglang("mem_cache.cache_init_params").CacheInitParams(
            False,
            self.rows,
            self.memory,
            page,
            is_eagle=is_eagle,
            tree_components=(parts.FULL,),
            **more,
        )
        if kind == "simple":
            self.cache = sglang("mem_cache.radix_cache").RadixCache(params)
        else:
            params.tree_core_backend = kind
            self.cache = loaded("sgl_ext.engine.scheduler.radix_cache").ExtendedRadixCache(params)
        self._value = torch.arange

    def key(self, ids: list[int], salt: str | None) -> Any:
        made = sglang("mem_cache.radix_cache").RadixKey(
            array("q", ids), None, is_bigram=self.is_eagle, cache_salt=salt
        )
        return made.page_aligned(self.page)

    def admit(self, req: Any) -> None:
        """Gives a request its row and memory, as if its prompt had been computed."""
        allocation, size = sglang("mem_cache.allocation"), len(req.origin_input_ids)
        req.init_next_round_input(self.cache)
        req.lock = self.cache.lock(req.last_node)
        allocation.alloc_req_slots(self.rows, [req], self.cache)
        row, at = self.rows.req_to_token[req.kv.req_pool_idx], req.prefix_len
        req.cached_tokens = at
        row[:at] = self.cache.prefix_device_indices(req)
        row[at:size] = allocation.alloc_token_slots(self.cache, size - at)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = size

    def insert(self, ids: list[int], salt: str | None) -> None:
        key = self.key(ids, salt)
        params = sglang("mem_cache.base_prefix_cache").InsertParams
        self.cache.insert(params(key=key, value=self._value(len(key))))

    def insert_owned(self, ids: list[int]) -> None:
        """Inserts tokens in memory that was allocated for them."""
        value = sglang("mem_cache.allocation").alloc_token_slots(self.cache, len(ids))
        params = sglang("mem_cache.base_prefix_cache").InsertParams
        self.cache.insert(params(key=self.key(ids, None), value=value))

    def match(self, ids: list[int], salt: str | None) -> Any:
        params = sglang("mem_cache.base_prefix_cache").MatchPrefixParams
        return self.cache.match_prefix(params(key=self.key(ids, salt)))

    def matched(self, ids: list[int], salt: str | None) -> int:
        return int(self.match(ids, salt).device_prefix_len)

    def evict(self, tokens: int) -> None:
        self.cache.evict(sglang("mem_cache.base_prefix_cache").EvictParams(tokens))


KINDS = ("simple", "rust", "python")
TEXT = st.lists(st.sampled_from([0, 1, 7]), max_size=7)


def salt_of(listed_: shared_prefixes.Prefixes, group: str | None, ids: list[int]) -> str | None:
    if group is None:
        return None
    tokens = listed_.shared(array("q", ids))
    return (
        shared_prefixes.shared_salt(salted(group, None), tokens) if tokens else salted(group, None)
    )


def common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("page", "is_eagle"), [(1, False), (2, False), (1, True)])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lists=st.lists(TEXT, min_size=1, max_size=3),
    asked=st.lists(st.tuples(st.sampled_from([None, *GROUPS]), TEXT), max_size=7),
)
def test_two_groups_share_listed_prefixes_and_nothing_after_them(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    page: int,
    is_eagle: bool,
    lists: list[list[int]],
    asked: list[tuple[str | None, list[int]]],
) -> None:
    monkeypatch.setattr(loaded("sgl_ext.engine.scheduler.state"), "is_entry_rank", lambda: False)
    tree, prefixes = Tree(kind, page, is_eagle), shared_prefixes.Prefixes()
    for ids in lists:
        prefixes.add(ids)
    held: list[tuple[str | None, list[int]]] = []

    def shares(one: tuple[str | None, list[int]], other: tuple[str | None, list[int]]) -> int:
        tokens = common(one[1], other[1])
        if one[0] != other[0]:
            listed_tokens = max(common(one[1], ids) for ids in lists)
            tokens = min(tokens, listed_tokens)
        return tokens

    for request in asked:
        ids, salt = request[1], salt_of(prefixes, *request)
        most = max((shares(request, other) for other in held), default=0)
        most = max(most - 1, 0) if is_eagle else most
        assert tree.matched(ids, salt) == most // page * page
        tree.insert(ids, salt)
        held.append(request)
        whole = max(len(ids) - 1, 0) if is_eagle else len(ids)
        assert tree.matched(ids, salt) == whole // page * page


@given(TEXT, TEXT, TEXT)
def test_how_much_is_listed_follows_from_the_tokens(
    one: list[int], other: list[int], prompt: list[int]
) -> None:
    prefixes = shared_prefixes.Prefixes()
    prefixes.add(one)
    prefixes.add(other)
    prefixes.add([5] * 3, "adapter")
    ids = array("q", prompt)
    assert prefixes.shared(ids) == max(common(one, prompt), common(other, prompt))
    assert prefixes.shared(ids, "adapter") == prefixes.shared(ids, "another") == 0
    assert prefixes.shared(array("q", [5, 5]), "adapter") == 2


def test_a_key_leaves_the_tokens_of_its_request_as_they_are() -> None:
    ids = array("q", range(10))
    key = sglang("mem_cache.radix_cache").RadixKey(
        token_ids=ids, limit=8, cache_salt=shared_prefixes.shared_salt("3:bob", 4)
    )
    assert ids == array("q", range(10))
    assert (len(key), key.cache_salt) == (8, None)
    assert key.token_ids[:4] == ids[:4]
    assert key.token_ids[4] < 0
    assert key.token_ids[5:] == ids[5:]
    assert key[2:6].token_ids == key.token_ids[2:6]


def asks(salt: Any, **more: Any) -> Any:
    """A request as SGLang makes it of a client's, with the salt that its group has it have."""
    asked = SimpleNamespace(cache_salt=salt, lora_path=None)
    isolate(asked, "bob")
    fields = dict.fromkeys(shared_prefixes._MORE_THAN_TOKENS)
    fields |= {"extra_key": None, "need_wait_for_mm_inputs": None, "rid": "r"}
    made = SimpleNamespace(**fields, cache_salt=asked.cache_salt, input_ids=array("q", [1, 2, 3]))
    vars(made).update(more)
    adapter = more.get("lora_path")
    shared_prefixes.share(made, None, SimpleNamespace(lora_path=adapter))
    return made


@pytest.fixture
def two_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = shared_prefixes.Prefixes()
    prefixes.add([1, 2])
    monkeypatch.setattr(shared_prefixes, "prefixes", lambda: prefixes)


@pytest.mark.usefixtures("two_listed")
def test_a_groups_request_that_begins_as_listed_is_shared_and_counted() -> None:
    before = counters.counter("shared_prefix_tokens")._value.get()
    made = asks(None)
    assert made.cache_salt == shared_prefixes.shared_salt("3:bob", 2)
    assert shared_prefixes.group_salt(made.cache_salt) == "3:bob"
    assert counters.counter("shared_prefix_tokens")._value.get() == before + 2
    assert asks("3:bob").cache_salt == made.cache_salt


@pytest.mark.usefixtures("two_listed")
@pytest.mark.parametrize("salt", [None, "own"])
@pytest.mark.parametrize("more", [{}, {"extra_key": "k"}, {"lora_path": "adapter"}])
def test_slices_have_the_salt_of_their_whole_prompt(salt: str | None, more: Any) -> None:
    asked = SimpleNamespace(**{"extra_key": None, "lora_path": None} | more, cache_salt=salt)
    isolate(asked, "bob")
    found = shared_prefixes.salt_of_slices(asked, array("q", [1, 2, 3]))
    assert found == asks(salt, **more).cache_salt
    name = slice_name(is_guess=False, is_forced=False, prompt="p", end=3)
    part = asks(asked.cache_salt, rid=name, input_ids=array("q", [1]))
    assert part.cache_salt == asked.cache_salt, "one token says nothing"


@pytest.mark.usefixtures("two_listed")
@pytest.mark.parametrize(
    "more",
    [
        {"salt": "own"},
        {"extra_key": "k"},
        {"need_wait_for_mm_inputs": True},
        {"input_ids": None},
        {"input_ids": array("q", [2, 1])},
        {"lora_path": "adapter"},
        *({field: object()} for field in shared_prefixes._MORE_THAN_TOKENS),
    ],
)
def test_what_is_not_of_listed_tokens_alone_stays_its_groups(more: dict[str, Any]) -> None:
    salt = more.get("salt")
    others = {field: value for field, value in more.items() if field != "salt"}
    assert asks(salt, **others).cache_salt == "3:bob" + (salt or "")


def test_the_fields_that_are_looked_at_are_there() -> None:
    kinds = sglang("managers.io_struct")
    fields = set(kinds.TokenizedGenerateReqInput.__struct_fields__)
    assert {*shared_prefixes._MORE_THAN_TOKENS, "extra_key", "need_wait_for_mm_inputs"} <= fields
    assert "cache_salt" not in kinds.TokenizedEmbeddingReqInput.__struct_fields__
    assert "lora_path" in kinds.GenerateReqInput.__annotations__


FORGED = st.builds(
    lambda front, tokens, own: f"{front}{tokens}:{own}",
    st.sampled_from(["", "shared:", "sgl_ext-shared-", "sgl_ext-shared-guess-"]),
    st.integers(-1, 9),
    st.sampled_from(["bob", "3:bob", "alice", "5:alice", ""]),
)


@given(st.one_of(FORGED, st.text(max_size=12)), st.sampled_from([None, "alice", ""]))
def test_no_salt_of_a_client_is_taken_for_ours(salt: str, group: str | None) -> None:
    """Not even of one who reaches an engine without the balancer."""
    request = SimpleNamespace(cache_salt=salt)
    isolate(request, group)
    given_ = request.cache_salt
    assert shared_prefixes.group_salt(given_) is None
    assert shared_prefixes.tokens_in_common(given_, shared_prefixes.shared_salt("3:bob", 4)) == 0
    key = sglang("mem_cache.radix_cache").RadixKey(array("q", [1, 2]), cache_salt=given_)
    assert (key.cache_salt, key.token_ids) == (given_ or None, array("q", [1, 2]))


@given(
    st.text(alphabet="0123456789:ab٣", max_size=6), st.text(alphabet="0123456789:ab٣", max_size=6)
)
def test_a_salt_is_whole_if_it_is_its_groups_alone(group: str, own: str) -> None:
    made = salted(group, own)
    assert is_whole_group(made) == (made == salted(group, None))
    assert not is_whole_group(shared_prefixes.shared_salt(salted(group, None), 3))


def test_how_far_two_requests_are_in_one_space() -> None:
    one, more = shared_prefixes.shared_salt("3:bob", 4), shared_prefixes.shared_salt("3:bob", 6)
    other = shared_prefixes.shared_salt("5:alice", 5)
    reach = shared_prefixes.tokens_in_common
    assert (
        reach(None, None)
        == reach("x", "x")
        == reach(one, one)
        == reach(one, more)
        == shared_prefixes.ALL
    )
    assert (reach(one, other), reach(None, other), reach(other, None)) == (4, 5, 5)
    for salt in ("x", "3:bobx", "3:bob"):
        assert reach(salt, one) == reach(one, salt) == reach(salt, None) == reach(salt, "y") == 0


def test_all_groups_wait_for_a_listed_prefix_that_is_being_computed() -> None:
    ids = array("q", range(3 * FOLLOW_TOKENS))

    def asking(salt: str | None) -> Any:
        return SimpleNamespace(
            skip_radix_cache_insert=False,
            finished=lambda: False,
            extra_key=None,
            cache_salt=salt,
            full_untruncated_fill_ids=ids,
            extend_end=0,
        )

    def waits(salt: str | None, other: str | None, at: int = 0) -> bool:
        probe = ids[at : at + FOLLOW_TOKENS]
        return admission.leads(asking(salt), asking(other), at, probe)

    alices = shared_prefixes.shared_salt("5:alice", FOLLOW_TOKENS + 10)
    bobs = shared_prefixes.shared_salt("3:bob", FOLLOW_TOKENS + 20)
    assert waits(alices, bobs)
    assert waits(None, bobs, at=20)
    assert not waits(alices, bobs, at=11), "what is shared is cached but for a little"
    assert not waits(alices, "3:bob")
    assert waits(bobs, bobs, at=FOLLOW_TOKENS + 20)


def test_a_leader_s_prompt_is_compared_as_far_as_it_matters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each request that waits is compared before each chunk of its leader."""
    view, compared = shared_prefixes._view, list[int]()

    def counted(ids: Any, length: int) -> Any:
        compared.append(length)
        return view(ids, length)

    monkeypatch.setattr(shared_prefixes, "_view", counted)
    ids = array("q", range(100_000))
    leader, follower = (
        SimpleNamespace(
            skip_radix_cache_insert=False,
            finished=lambda: False,
            extra_key=None,
            cache_salt=None,
            full_untruncated_fill_ids=ids,
            extend_end=8192,
        )
        for _ in range(2)
    )
    assert admission.leads(leader, follower, 4096, ids[4096 : 4096 + FOLLOW_TOKENS])
    assert compared == [4096 + FOLLOW_TOKENS] * 2


class Served(Tree):
    """A tree behind which requests run, as far as its pins see."""

    def ask(self, group: str, ids: list[int], *marks: int, sent_s: float = 1.0) -> Any:
        batch = sglang("managers.schedule_batch")
        salt = salt_of(shared_prefixes.prefixes(), group, ids)
        req = batch.Req(
            str(next(_names)), "", array("q", ids), batch.SamplingParams(), cache_salt=salt
        )
        told = tuple((end, 300.0) for end in marks)
        hints = Hints((), (), told, group, group, sent_s, True, False, True)
        req.sgl_ext = RequestState(hints)
        self.admit(req)
        self.cache.checkpoint(req, up_to=len(ids))
        req.finished_reason = batch.FINISH_LENGTH(0)
        sglang("mem_cache.common").release_kv_cache(req, self.cache, checkpoint=True)
        self.cache.pins.pins.check()
        self.cache.sanity_check()
        free, tree = self.memory.available_size(), self.cache
        assert free + tree.full_evictable_size() + tree.full_protected_size() == TOKENS
        return req

    def flood(self) -> None:
        source = random.Random(1)
        for _ in range(3 * TOKENS // 100):
            self.ask("flood", [source.randrange(1000, 1 << 20) for _ in range(100)])


@pytest.fixture(params=["rust", "python"])
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """The first 100 numbers are listed."""
    monkeypatch.setattr(loaded("sgl_ext.engine.scheduler.state"), "is_entry_rank", lambda: True)
    monkeypatch.setenv(*EngineSettings(pin_budget=0.9).to_environment().popitem())
    prefixes = shared_prefixes.Prefixes()
    prefixes.add(list(range(100)))
    monkeypatch.setattr(shared_prefixes, "prefixes", lambda: prefixes)
    with sglang("runtime_context").get_context().override_server_args():
        yield Served(request.param)


LISTED = list(range(100))


def test_a_pin_after_a_shared_prefix_holds_and_is_charged(served: Served) -> None:
    mine, theirs = [*LISTED, *range(200, 250)], [*LISTED, *range(200, 250)]
    served.ask("alice", mine, WHOLE_PROMPT)
    assert served.ask("bob", theirs).cached_tokens == 100
    (pin,) = served.cache.pins.pins
    assert (pin.owner, pin.tokens) == ("alice", 150)
    served.flood()
    assert served.ask("alice", [*mine, 7]).cached_tokens == 150
    assert served.ask("bob", theirs).cached_tokens == 100


def test_each_group_has_its_own_pin_on_a_shared_prefix(served: Served) -> None:
    for group in GROUPS:
        served.ask(group, [*LISTED, *range(200, 210)], 60, 100)
    pins = list(served.cache.pins.pins)
    assert sorted((pin.owner, pin.tokens) for pin in pins) == [
        (group, tokens) for group in GROUPS for tokens in (60, 100)
    ]
    gone = [pin for pin in pins if pin.owner == "alice"]
    served.cache.pins.release(gone, "deleted")
    served.flood()
    assert served.ask("alice", [*LISTED, 300]).cached_tokens == 100, "bob's pins hold it"


def test_pins_of_all_groups_on_a_shared_prefix_give_way_to_a_request(served: Served) -> None:
    for group in GROUPS:
        served.ask(group, [*LISTED, *range(200, 210)], 60, 100)
    served.evict(TOKENS)
    assert served.memory.available_size() == TOKENS
    assert not list(served.cache.pins.pins)


def test_a_pin_is_renewed_by_the_next_turn_though_more_of_it_is_shared(served: Served) -> None:
    served.ask("alice", LISTED[:40], WHOLE_PROMPT, sent_s=1.0)
    served.ask("alice", [*LISTED, 500], sent_s=200.0)
    served.cache.pins.advance(400.0)
    assert [pin.tokens for pin in served.cache.pins.pins] == [40]


@pytest.fixture
def list_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Callable[..., Any]:
    """Lists a file's prompts, of which SGLang makes as told: tokens, or a refusal."""
    prefixes = shared_prefixes.Prefixes()
    monkeypatch.setattr(service, "prefixes", lambda: prefixes)

    async def run(*lines: bytes, made: Any = (), **fields: Any) -> Any:
        async def convert(*_: Any) -> DryRun:
            conversion = DryRun()
            if isinstance(made, str):
                conversion.status, conversion.answer = 400, made.encode()
                return conversion
            usual = {"cache_salt": None, "extra_key": None, "lora_path": None}
            conversion.request = SimpleNamespace(
                **(usual | {"input_ids": list(made), "contains_mm_input": lambda: False} | fields)
            )
            conversion.context = RequestContext()
            return conversion

        monkeypatch.setattr(service, "convert", convert)
        path = tmp_path / "share.jsonl"
        path.write_bytes(b"\n".join(lines))
        tokenizer = SimpleNamespace(decode=None)
        manager = SimpleNamespace(tokenizer=tokenizer, max_req_input_len=5)
        jobs = await service.share_prompts(None, manager, str(path))
        return jobs, prefixes

    return run


GOOD = b'{"messages": [{"role": "user", "content": "a"}]}'


async def test_each_line_is_listed_and_is_to_be_prefilled(list_all: Any) -> None:
    jobs, prefixes = await list_all(GOOD, GOOD, made=[1, 2, 3])
    assert [job.ids.tolist() for job in jobs] == [[1, 2, 3]] * 2
    assert prefixes.shared(array("q", [1, 2, 9])) == 2
    assert await service.share_prompts(None, None, None) == []


@pytest.mark.parametrize(
    ("line", "made", "fields", "named"),
    [
        (b"{", [1], {}, "unexpected"),
        (b"{}", [1], {}, "no known protocol"),
        (GOOD, '{"error": "no such model"}', {}, "no such model"),
        (GOOD, [], {}, "not of text alone"),
        (GOOD, [1] * 6, {}, "has 6 tokens, and this engine takes 5"),
        (GOOD, [1], {"cache_salt": "x"}, "cache_salt"),
        (GOOD, [1], {"extra_key": "x"}, "extra_key"),
        (GOOD, [1], {"contains_mm_input": lambda: True}, "more than text"),
    ],
)
async def test_a_line_that_cannot_be_shared_is_named(
    list_all: Any, line: bytes, made: Any, fields: dict[str, Any], named: str
) -> None:
    good = line if line == GOOD else GOOD
    with pytest.raises(ValueError, match=rf"share\.jsonl': line [12]: .*{named}"):
        await list_all(good, line, made=made, **fields)
