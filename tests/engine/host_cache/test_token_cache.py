"""The token cache gives the tokens of SGLang's own tokenization, or turns itself off."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ext.engine.core.request_context import RequestContext, entered
from sgl_ext.engine.host_cache.token_cache import TokenCache
from sgl_ext.engine.http.cache_hooks import encode_prompt
from sgl_ext.engine.http.extension import HttpExtension

TURN = "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
PLAIN = {"add_special_tokens": False}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


def whole(tokenizer: Any, text: str, options: dict[str, Any] | None = None) -> list[int]:
    return list(tokenizer.encode(text, **(options or {})))


@pytest.fixture
def cache(tokenizer: Any, extension: HttpExtension) -> TokenCache:
    made = TokenCache(tokenizer, whole, 1 << 20)
    extension.token_cache = made
    return made


def test_a_prompt_has_the_tokens_that_sglang_makes(cache: TokenCache, tokenizer: Any) -> None:
    cache.prove()
    assert not cache.is_off
    for text in (TURN, TURN * 3, TURN + "and on", "", "no token of its own"):
        for options in (None, {}, PLAIN):
            assert encode_prompt(whole, tokenizer, text, options) == whole(tokenizer, text)


def test_a_known_prompt_is_not_tokenized_again(cache: TokenCache, tokenizer: Any) -> None:
    encode_prompt(whole, tokenizer, TURN, PLAIN)
    new = cache.new_tokens
    encode_prompt(whole, tokenizer, TURN, PLAIN)
    assert cache.new_tokens == new > 0


def test_cache_groups_do_not_share_tokens(cache: TokenCache, tokenizer: Any) -> None:
    right, new = whole(tokenizer, TURN), []
    for group in ("one", "other", None, "one"):
        with entered(RequestContext(group=group)):
            assert encode_prompt(whole, tokenizer, TURN, PLAIN) == right
        new.append(cache.new_tokens)
    assert new == [new[0], 2 * new[0], 3 * new[0], 3 * new[0]]


@pytest.mark.parametrize("options", [{"truncation": True, "max_length": 3}, {"padding": True}])
def test_options_beyond_encoding_are_left_to_sglang(
    cache: TokenCache, tokenizer: Any, options: dict[str, Any]
) -> None:
    given = encode_prompt(whole, tokenizer, TURN, options)
    assert given == whole(tokenizer, TURN, options)
    assert cache.new_tokens == 0


def test_another_tokenizer_is_left_to_sglang(cache: TokenCache, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(tiny_model)
    assert encode_prompt(whole, other, TURN, PLAIN) == whole(other, TURN)
    assert cache.new_tokens == 0


def test_a_wrong_token_found_while_serving_turns_it_off(cache: TokenCache, tokenizer: Any) -> None:
    right = encode_prompt(whole, tokenizer, TURN, PLAIN)
    expected = whole(tokenizer, TURN, PLAIN)
    cache.check(expected, list(right))
    assert not cache.is_off
    cache.check(expected, [*right[:-1], 0])
    assert cache.is_off
    assert encode_prompt(whole, tokenizer, TURN, PLAIN) == right


@pytest.mark.parametrize(("check_s", "checks"), [(0.1, 10), (4.0, 2)])
def test_checks_of_long_prompts_take_a_small_share_of_the_time(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, check_s: float, checks: int
) -> None:
    now = SimpleNamespace(s=0.0)
    wholes: list[str] = []

    def slow(tokenizer: Any, text: str, options: Any = None) -> list[int]:
        now.s += check_s
        wholes.append(text)
        return whole(tokenizer, text)

    class Inline:
        def __init__(self, target: Any, **_: Any) -> None:
            self.start = target

    module = "sgl_ext.engine.host_cache.token_cache"
    monkeypatch.setattr(f"{module}.time.monotonic", lambda: now.s)
    monkeypatch.setattr(f"{module}.threading.Thread", Inline)
    cache = TokenCache(tokenizer, slow, 1 << 20)
    cache.worth.now = lambda: now.s
    cache.encode(TURN)
    wholes.clear()
    for minute in range(1, 11):
        now.s = max(now.s, minute * 61.0)
        cache.encode(TURN)
    assert len(wholes) == checks
    assert not cache.is_off


def test_a_tokenizer_that_fails_the_proof_is_left_to_sglang(
    tokenizer: Any, extension: HttpExtension
) -> None:
    def contextual(tokenizer: Any, text: str, options: Any = None) -> list[int]:
        return [*whole(tokenizer, text), len(text) % 7]

    made = TokenCache(tokenizer, contextual, 1 << 20)
    made.prove()
    extension.token_cache = made
    assert made.is_off
    assert encode_prompt(contextual, tokenizer, TURN, PLAIN) == contextual(tokenizer, TURN)
