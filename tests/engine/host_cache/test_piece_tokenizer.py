"""Encoding piece by piece gives the tokenizer's own tokens, for every family of tokenizers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from sgl_ext.engine.host_cache.token_cache import Inexact, PieceTokenizer

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|im_end|>>", "[SEP]")
CORPUS = [
    "The quick brown fox jumps over the lazy dog, 1234 times and 5 more.",
    "def function(argument: int) -> str:\n    return str(argument) + '\\n'\n",
    "Stra\u00dfe, caf\u00e9, na\u00efve, \u4f60\u597d\u4e16\u754c, \u043f\u0440\u0438\u0432",
    '{"name": "read_file", "arguments": {"path": "/a/b.py", "lines": [1, 20]}}',
] * 4
SIZE = 400


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=SIZE, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_level_with_a_space() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def sentencepiece(scheme: str) -> Callable[[], Tokenizer]:
    def made() -> Tokenizer:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        trainer = trainers.BpeTrainer(
            vocab_size=SIZE, special_tokens=["<unk>"], show_progress=False
        )
        tokenizer.train_from_iterator(CORPUS, trainer)
        return tokenizer

    return made


def llama_2() -> Tokenizer:
    """Without a pre-tokenizer: the normalizer writes the blanks, and BPE sees a whole piece."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    trainer = trainers.BpeTrainer(vocab_size=SIZE, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=SIZE, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=SIZE, special_tokens=["[UNK]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "byte-level BPE": byte_level,
    "byte-level BPE with a space before": byte_level_with_a_space,
    "SentencePiece BPE, a space always": sentencepiece("always"),
    "SentencePiece BPE, a space at first": sentencepiece("first"),
    "SentencePiece BPE, no space": sentencepiece("never"),
    "Llama 2": llama_2,
    "Unigram": unigram,
    "WordPiece": word_piece,
}


def piece_tokenizer(
    tokenizer: Tokenizer, *tokens: AddedToken, limit: int = 1 << 20, long_tokens: int = 1
) -> PieceTokenizer:
    special = [AddedToken(name, normalized=False, special=True) for name in SPECIALS]
    tokenizer.add_tokens(list(tokens))
    tokenizer.add_special_tokens(special)
    added = {
        token.content: number
        for number, token in tokenizer.get_added_tokens_decoder().items()
        if not token.normalized
    }
    return PieceTokenizer(
        added,
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        lambda texts: [one.ids for one in tokenizer.encode_batch(texts, add_special_tokens=False)],
        limit,
        long_tokens,
    )


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> PieceTokenizer:
    return piece_tokenizer(FAMILIES[request.param]())


def test_every_family_passes_the_proof(family: PieceTokenizer) -> None:
    assert family.proven()


snippets = st.sampled_from(
    [*SPECIALS, " ", "  ", "\n", "\t", "the", " the", "1234", "caf\u00e9", "\u0301", "\ufb01", "<|"]
)
texts = st.lists(st.one_of(snippets, st.text(max_size=6)), max_size=14).map("".join)


@given(texts=st.lists(texts, min_size=1, max_size=4))
@settings(max_examples=150)
def test_tokens_are_the_tokenizers_own(family: PieceTokenizer, texts: list[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            continue
        assert not family.differs(text)
    family.pieces.check()


@pytest.mark.long
@given(parts=st.lists(texts, min_size=2, max_size=6), rounds=st.data())
@settings(max_examples=150)
def test_prompts_that_grow_have_the_tokenizers_own_tokens(
    family: PieceTokenizer, parts: list[str], rounds: st.DataObject
) -> None:
    """Text after a turn changes in the next prompt, as with chat templates."""
    prompt = ""
    for part in parts:
        prompt += part
        for text in (prompt, prompt + rounds.draw(texts)):
            if text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text):
                assert not family.differs(text)
    family.pieces.check()
    family.prompts.check()


def test_a_prompt_continues_from_the_one_before_it() -> None:
    made = piece_tokenizer(byte_level())
    looked: list[bytes] = []
    find = made.pieces.get
    made.pieces.get = lambda name: looked.append(name) or find(name)  # type: ignore[method-assign,func-returns-value]
    turn = "<|im_start|>user\nHello there<|im_end|>\n"
    for count in range(1, 9):
        looked.clear()
        assert not made.differs(turn * count + "<|im_start|>assistant\n<think>\n\n</think>")
    assert len(looked) < 8
    for _ in range(4):  # the same again
        looked.clear()
        assert not made.differs(turn * 8 + "<|im_start|>assistant\n<think>\n\n</think>")
        assert len(looked) < 8
    assert len(made.prompts) == 1


def test_changing_a_prompt_s_tokens_does_not_change_the_cache() -> None:
    made = piece_tokenizer(byte_level())
    turn = "<|im_start|>user\nHello there<|im_end|>\n"
    for text in (turn, turn, turn * 3, turn * 3):
        tokens = made.encode(text)
        assert tokens.tolist() == made._encode(text)
        tokens[0] = 0
        del tokens[3:]


def test_spaces_do_not_share_prompts() -> None:
    made = piece_tokenizer(byte_level())
    prompt = "<|im_start|>user\nHello there<|im_end|>\n" * 3
    made.encode(prompt, "a")
    assert made.prompts.known_prefix("a", prompt) is not None
    assert made.prompts.known_prefix("b", prompt) is None


def test_only_new_pieces_are_tokenized() -> None:
    made = piece_tokenizer(byte_level())
    seen: list[str] = []
    inner = made._encode_many

    def counting(texts: list[str]) -> list[list[int]]:
        seen.extend(texts)
        return inner(texts)

    made._encode_many = counting  # type: ignore[assignment]
    turns = "<|im_start|>user\nHello there<|im_end|>\n"
    made.encode(turns)
    seen.clear()
    made.encode(turns + "<|im_start|>assistant\nHi<|im_end|>\n")
    assert seen == ["<|im_start|>assistant\nHi"]


def test_an_evicted_piece_is_tokenized_again() -> None:
    made = piece_tokenizer(byte_level(), limit=1)
    text = "<|im_start|>user\nHello there<|im_end|>\n"
    assert not made.differs(text)
    assert not made.differs(text)
    assert len(made.pieces) == len(made.prompts) == 0


@pytest.mark.parametrize(
    ("option", "passes"), [("lstrip", False), ("rstrip", True), ("single_word", False)]
)
def test_an_added_token_that_changes_the_text_before_it_fails_the_proof(
    option: str, passes: bool
) -> None:
    greedy = AddedToken("<|greedy|>", normalized=False, **{option: True})
    assert piece_tokenizer(byte_level(), greedy).proven() is passes


def test_a_tokenizer_whose_pieces_depend_on_each_other_fails_the_proof() -> None:
    plain = byte_level()
    plain.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIALS])
    added = {token.content: n for n, token in plain.get_added_tokens_decoder().items()}

    def contextual(text: str) -> list[int]:
        return [*plain.encode(text, add_special_tokens=False).ids, len(text) % 7]

    made = PieceTokenizer(added, contextual, lambda texts: list(map(contextual, texts)), 1 << 20)
    assert not made.proven()


def test_a_wrong_added_token_is_noticed() -> None:
    plain = byte_level()

    def encode(text: str) -> list[int]:
        return plain.encode(text, add_special_tokens=False).ids

    made = PieceTokenizer({"<|gone|>": 7}, encode, lambda texts: list(map(encode, texts)), 1 << 20)
    with pytest.raises(Inexact):
        made.encode("a<|gone|>b")
    assert not made.proven()
