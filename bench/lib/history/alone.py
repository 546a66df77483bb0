"""The stages of our host path by themselves: CPU time, and memory, for one long history.

Nothing else runs in this process, so the figures show what grows faster than the history. Memory is
that of Python's objects: what a stage leaves, and the most that it needs meanwhile.
"""

from __future__ import annotations

import gc
import json
import time
import tracemalloc
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson
from tokenizers import Tokenizer

from radix.index import PrefixIndex
from radix.pins import Pins
from radix.residency import Residency
from sgl_ext.balancer.relay.reading import parse_json
from sgl_ext.engine.host_cache.token_cache import PieceTokenizer
from sgl_ext.protocols.anthropic import ANTHROPIC
from sgl_ext.reading.segments import read_chain
from sgl_ext.reading.strip import HeaderStrip, strip_request
from sgl_ext.wire.events import lines_of

_CHUNK_TOKENS = 8_192
_MARK_TTL_S = 300.0
_CACHE_BYTES = 256 << 20
_MIB = 1 << 20

Stages = dict[str, dict[str, float]]
TOKENIZER_STAGE = "tokenize cold"
"""The work of the tokenizers library alone, which no code of ours changes."""


class Alone:
    """Measures histories with one model's tokenizer, each stage `rounds` times."""

    def __init__(self, model: Path, rounds: int) -> None:
        self._rounds = rounds
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._added = {
            token.content: number
            for number, token in self._tokenizer.get_added_tokens_decoder().items()
            if not token.normalized
        }

    def stages(self, body: bytes) -> Stages:
        """CPU milliseconds, and MiB, of each stage for a body of `/v1/messages`. Of the rounds the
        quickest counts."""
        document = parse_json(body)
        chain = read_chain(ANTHROPIC, document)
        text = _text_of(document)
        known = self._pieces()
        ids = known.encode(text)
        turn = f"{text}<|im_start|>user\nGo on.<|im_end|>\n"
        index = _indexed(chain.hashes, len(ids))
        found: Stages = {}

        def measure(stage: str, work: Callable[[], object]) -> None:
            found[stage] = self._measure(work)

        measure("balancer parse", lambda: parse_json(body))
        measure("balancer strip", lambda: strip_request(ANTHROPIC, document, HeaderStrip()))
        measure("segments", lambda: read_chain(ANTHROPIC, document))
        measure("index", lambda: _indexed(chain.hashes, len(ids)))
        measure("index match", lambda: index.matches(chain.hashes))
        measure(TOKENIZER_STAGE, lambda: self._encoded(text))
        measure("tokenize warm", lambda: known.encode(turn))
        measure("token ids as sent", lambda: msgspec.msgpack.encode(ids.tobytes()))
        measure("residency and events", lambda: _events(chain.hashes, chain.ends, ids))
        measure("pins", lambda: _pinned(ids))
        return found

    def _pieces(self) -> PieceTokenizer:
        tokenizer = self._tokenizer

        def encode(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False).ids)

        def encode_many(texts: Sequence[str]) -> list[list[int]]:
            return [encode(text) for text in texts]

        return PieceTokenizer(self._added, encode, encode_many, _CACHE_BYTES)

    def _encoded(self, text: str) -> PieceTokenizer:
        pieces = self._pieces()
        pieces.encode(text)
        return pieces

    def _measure(self, work: Callable[[], object]) -> dict[str, float]:
        times = []
        for _ in range(self._rounds):
            gc.collect()
            begun_s = time.process_time()
            work()
            times.append(time.process_time() - begun_s)
        gc.collect()
        tracemalloc.start()
        left = work()
        kept, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        del left
        return {
            "cpu_ms": round(min(times) * 1e3, 3),
            "kept_mib": round(kept / _MIB, 3),
            "peak_mib": round(peak / _MIB, 3),
        }


def _text_of(document: Mapping[str, Any]) -> str:
    """The history as a template of the ChatML kind renders it, give or take a few words."""
    turns = []
    for message in document["messages"]:
        content = message["content"]
        said = content if isinstance(content, str) else json.dumps(content)
        turns.append(f"<|im_start|>{message['role']}\n{said}<|im_end|>\n")
    return "".join(turns)


def _indexed(hashes: Sequence[int], tokens: int) -> PrefixIndex:
    """A balancer's index that has heard of the history."""
    index = PrefixIndex()
    parent = None
    for number, segment in enumerate(hashes, start=1):
        index.store(0, parent, segment, tokens * number // len(hashes))
        parent = segment
    return index


def _events(hashes: Sequence[int], ends: Sequence[int], ids: array[int]) -> tuple[object, int]:
    """An engine's residency after a chunked prefill, and the bytes of its events."""
    residency, sent = Residency(), 0
    for resident in [*range(_CHUNK_TOKENS, len(ids), _CHUNK_TOKENS), len(ids)]:
        before = max(0, resident - _CHUNK_TOKENS)
        residency.add(
            hashes, ends, key=ids, resident=resident, node=resident, had=before, own=before
        )
        sent += sum(len(orjson.dumps(line)) for line in lines_of(residency.take()))
    return residency, sent


def _pinned(ids: array[int]) -> Pins:
    """A pin on the history, which the next turn reads."""
    key = ids.tobytes()
    pins = Pins(budget_tokens=len(ids))
    pins.grant("", key, _MARK_TTL_S, 0.0)
    pins.hit("", key, 1.0, len(ids))
    return pins
