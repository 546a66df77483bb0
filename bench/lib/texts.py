"""Texts out of the standard library's source, by how many tokens they are to have."""

from __future__ import annotations

import json
import random
from pathlib import Path

from sgl_ext_cpu.node import Node

_FLOOD_TOKENS = (600, 1500)
_SAMPLE_WORDS = 500


class Texts:
    """Equal names give equal texts. `fit` first: until then a word counts as a token."""

    def __init__(self) -> None:
        paths = sorted(Path(json.__file__).parent.parent.glob("*.py"))
        self.source = "\n".join(path.read_text(errors="replace") for path in paths)
        self._words = self.source.split()
        self._tokens_a_word = 1.0

    def fit(self, tokens: int, words: int) -> None:
        """Says how many tokens a sample of so many words has on this model."""
        self._tokens_a_word = tokens / words

    def fresh(self, name: str, tokens: int) -> str:
        """A text of about so many tokens, that shares no beginning with one of another name."""
        return f"{name}: {self.words(name, round(tokens / self._tokens_a_word))}"

    def words(self, name: str, count: int) -> str:
        """As many words, chosen by the name."""
        return " ".join(random.Random(name).choices(self._words, k=count))

    def flood(self, name: str, tokens: int) -> list[str]:
        """Prompts of so many tokens in all."""
        chance, made = random.Random(name), list[str]()
        while tokens > 0:
            size = chance.randint(*_FLOOD_TOKENS)
            made.append(self.fresh(f"{name}, {len(made)}", size))
            tokens -= size
        return made


def fitted(node: Node) -> Texts:
    """Texts that know how long words are in tokens of the node's model."""
    texts = Texts()
    sampling = {"max_new_tokens": 1}
    sample = {"text": texts.words("a sample", _SAMPLE_WORDS), "sampling_params": sampling}
    answer = node.post("/generate", sample)
    answer.raise_for_status()
    texts.fit(int(answer.json()["meta_info"]["prompt_tokens"]), _SAMPLE_WORDS)
    return texts
