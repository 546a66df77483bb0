"""A byte-level BPE tokenizer, trained in seconds on the standard library's source.

It splits text as Qwen3's does and has the special tokens its chat template needs. Every
Python contains that text, so training needs no network, and the same Python gives the same
tokenizer.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL = (END_OF_TEXT, START_OF_TURN, END_OF_TURN)
"""Never part of the text a client receives."""
MARKUP = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>"),
)
"""One token each, and part of the text, so that SGLang's parsers can see them."""

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CORPUS_BYTES = 4_000_000
_LEFT_OUT = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "encodings", "site-packages", "dist-packages"}
)


def train(vocabulary: int) -> Tokenizer:
    """Return a tokenizer of exactly `vocabulary` tokens, `CONTROL` and `MARKUP` included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]  # tokenizers' own stub
        vocab_size=vocabulary - len(CONTROL) - len(MARKUP),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_special_tokens(list(CONTROL))
    tokenizer.add_tokens(list(MARKUP))
    if tokenizer.get_vocab_size() != vocabulary:
        raise RuntimeError(
            f"the standard library's source is too small to train {vocabulary} tokens: "
            f"got {tokenizer.get_vocab_size()}"
        )
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path, template: str, max_length: int) -> None:
    """Write the files from which transformers and SGLang load the tokenizer."""
    tokenizer.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def words(tokenizer: Tokenizer) -> list[int]:
    """The tokens that are a space and a lower-case word: text made of them is valid
    UTF-8, reads as words, and has the same tokens when it is tokenized again."""
    return sorted(
        number
        for token, number in tokenizer.get_vocab().items()
        if token.startswith("Ġ") and token[1:].isascii() and token[1:].isalpha()
        if token[1:].islower()
    )


def _corpus() -> Iterator[str]:
    """The standard library's source in a fixed order, up to `_CORPUS_BYTES`."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path.relative_to(library)
        for path in library.rglob("*.py")
        if not _LEFT_OUT.intersection(path.relative_to(library).parts)
    )
    left = _CORPUS_BYTES
    for file in files:
        text = (library / file).read_text(encoding="utf-8", errors="replace")[:left]
        left -= len(text)
        yield text
        if left <= 0:
            return
