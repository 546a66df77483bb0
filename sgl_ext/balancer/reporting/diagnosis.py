"""Looks at each prompt as it comes: whose it is, and where it parts from the one before.

Of the prompts themselves only places, sizes and kinds leave this process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import orjson

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.attempt import RoutingRequest
from sgl_ext.doctor.blocks import PATHS, Block, read_blocks
from sgl_ext.doctor.findings import Findings
from sgl_ext.doctor.harness import harness_of
from sgl_ext.doctor.memory import LIMIT_BYTES, Divergence, Memory, Prompt
from sgl_ext.requests.headers import HeaderStrip
from sgl_ext.requests.segments import with_sorted_tools
from sgl_ext.requests.session import stated_session
from sgl_ext.requests.system_text import Stripped, strip_request

log = logging.getLogger(__name__)

# What parts caches on a client's own wish: prompts that differ in these are not compared.
_PARTING = frozenset({"lora_path", "cache_salt", "extra_key"})
_LONGEST_MODEL = 100
# Comparing takes at most this share of the time, and so much of it at a stretch.
_SHARE = 0.1
_STRETCH_S = 2.0
# Longer prompts are not kept: to read one again would hold up all others.
_LONGEST_BYTES = 1024 * 1024


class _Busy(Exception):
    """There is no time left to compare."""


class Seen(NamedTuple):
    """A prompt's sender, and the `divergence` of its line in the log, None if it has none."""

    harness: str
    model: str
    divergence: dict[str, Any] | None


class Diagnosis:
    """Remembers recent prompts within `limit_bytes`; and what it found, added up in `findings`."""

    def __init__(
        self,
        strip: HeaderStrip,
        metrics: Metrics,
        *,
        sort_tools: bool = False,
        limit_bytes: int = LIMIT_BYTES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._looked_s = clock()
        self._spare_s = _STRETCH_S
        self._strip = strip
        self._metrics = metrics
        self._prepare: Callable[[Any], Any] = with_sorted_tools if sort_tools else _as_it_is
        self._memory = Memory(self._read, limit_bytes)
        self.findings = Findings()

    def see(
        self,
        path: str,
        fields: Mapping[bytes, bytes],
        hints: Mapping[str, str],
        stripped: Stripped,
        routing: RoutingRequest,
        raw: bytes | bytearray,
    ) -> Seen:
        """Compares a prompt with those before it. Never raises: it is not the request's affair.

        fields: its headers; hints: those that `hints_of` reads; raw: its body, kept as it is.
        """
        harness = harness_of(fields, stripped.fields)
        body = stripped.body if isinstance(stripped.body, dict) else {}
        model = body.get("model")
        model = model[:_LONGEST_MODEL] if isinstance(model, str) else ""
        if path not in PATHS or body.get("previous_response_id") is not None:
            return Seen(harness, model, None)
        if len(raw) > _LONGEST_BYTES:
            self._metrics.prompts_not_compared.counts[("long",)] += 1
            return Seen(harness, model, None)
        parting = "" if _PARTING.isdisjoint(body) else str([body.get(key) for key in _PARTING])
        group = (routing.tenant, harness, model, path, parting)
        session = stated_session(hints, body)
        prompt = Prompt(group, session, routing.session, path, routing.chain, raw)
        found = self._look(prompt)
        if found is None:
            return Seen(harness, model, None)
        difference = found.difference
        tokens = difference.lost_bytes * routing.prompt_tokens // max(routing.chain.ends[-1], 1)
        divergence = {
            "scope": found.scope,
            "part": difference.part,
            "block": difference.block,
            "byte": difference.byte,
            "bytes": difference.bytes,
            "kind": difference.kind,
            "tokens": tokens,
        }
        return Seen(harness, model, divergence)

    def _look(self, prompt: Prompt) -> Divergence | None:
        now_s = self._clock()
        self._spare_s = min(self._spare_s + _SHARE * (now_s - self._looked_s), _STRETCH_S)
        try:
            return self._memory.look(prompt)
        except _Busy:
            self._metrics.prompts_not_compared.counts[("busy",)] += 1
        except Exception as error:
            # Without its text, which might quote the prompt.
            log.error("a prompt could not be compared with earlier ones: %s", type(error).__name__)
            self._metrics.prompts_not_compared.counts[("error",)] += 1
        finally:
            self._looked_s = self._clock()
            self._spare_s -= self._looked_s - now_s
        return None

    def _read(self, path: str, raw: bytes | bytearray) -> list[Block]:
        """A body's blocks as the engine will see them."""
        if self._spare_s <= 0:
            raise _Busy
        body = strip_request(path, orjson.loads(raw), self._strip).body
        return read_blocks(path, self._prepare(body))


def _as_it_is(body: Any) -> Any:
    return body
