"""Reads the bodies of requests with what they name in the store: small ones here, and large ones in
a process beside the balancer's, whose event loop goes on meanwhile.

JSON parsers compute without a pause, and threads of one process take turns. The process starts
with the first large body. A body goes there, and a changed one comes back, in a file that is only
in memory: copying it does not hold up the loop, as pickling would. While a body waits, the byte
budget counts this copy, so few can wait. If the process ends, the requests that wait for it get
503, and the next one starts a new process.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from http import HTTPStatus
from io import FileIO
from typing import Any

from msgspec import structs

from sgl_ext.balancer.conversations.contexts import Registration
from sgl_ext.balancer.conversations.conversation_store import ConversationStore
from sgl_ext.balancer.conversations.expansion import Found, Named
from sgl_ext.balancer.conversations.response_turns import LaneTurns
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.relay.reading import (
    BodyReader,
    HintRules,
    Reading,
    ReadPlan,
    read_registration,
)
from sgl_ext.limits.bounds import LARGE_BODY_BYTES, READING_S
from sgl_ext.limits.byte_account import ByteAccount
from sgl_ext.protocols.errors import BalancerError, no_memory
from sgl_ext.reading.strip import HeaderStrip

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 5
# Of a document, longer values stay in the other process.
_SHORT_CHARS = 4096


class Bodies:
    """Reads bodies.

    reader: of bodies that are not large.
    strip: what is left out of prompts. conversations: what bodies name in the store.
    hint_rules: the operator's default hints.
    """

    def __init__(
        self,
        metrics: Metrics,
        account: ByteAccount,
        strip: HeaderStrip,
        conversations: ConversationStore,
        hint_rules: HintRules,
        *,
        sort_tools: bool,
    ) -> None:
        self.strip = strip
        self.conversations = conversations
        self.hint_rules = hint_rules
        keeps_turns = conversations.documents.exist
        self.reader = BodyReader(strip, sort_tools=sort_tools, keeps_turns=keeps_turns)
        self.large = LargeBodies(
            account,
            metrics.background_failed,
            strip,
            sort_tools=sort_tools,
            keeps_turns=keeps_turns,
        )
        blocks = self.reader.expander.blocks
        size, limit = (lambda: blocks.used_bytes), (lambda: blocks.limit_bytes)
        metrics.tables.add("parsed_contexts", size, limit, "bytes")

    def change(self, hint_rules: HintRules, response_ttl_s: float) -> None:
        """Changes the settings."""
        self.hint_rules = hint_rules
        self.conversations.response_ttl_s = response_ttl_s

    async def read(
        self,
        tenant: str,
        plan: ReadPlan,
        body: bytes | bytearray,
        named: Named | None = None,
        turns: LaneTurns | None = None,
    ) -> Reading:
        """Reads a body with what it names, in another process if that is large.

        named: what it names, if that is known. turns: what its connection remembers. As
        `BodyReader.read`; raises BalancerError 503 if the store fails, or if the process fails or
        has no room.
        """
        reading: Reading | Named = named or await self._read(tenant, plan, body, None)
        if isinstance(reading, Named):
            found = await self.conversations.find(reading, plan.tenant, turns)
            reading = await self._read(tenant, plan, body, found)
        assert not isinstance(reading, Named), "what it names was found"
        return reading

    async def read_registration(self, tenant: str, body: bytes) -> Registration:
        """As `reading.read_registration`, in another process if it is large."""
        if len(body) <= LARGE_BODY_BYTES:
            return Registration(*read_registration(body))
        about, items = await self.large.call(tenant, body, read_registration)
        assert items is not None, "a context has blocks"
        return Registration(about, items)

    def close(self) -> None:
        """Ends the other process."""
        self.large.close()

    async def _read(
        self, tenant: str, plan: ReadPlan, body: bytes | bytearray, found: Found | None
    ) -> Reading | Named:
        size_bytes = len(body) + (0 if found is None else found.size_bytes)
        if size_bytes > LARGE_BODY_BYTES:
            return await self.large.read(tenant, plan, body, found)
        return self.reader.read(plan, body, found)


class LargeBodies:
    """One process, and the requests that wait for it.

    failed: called with this task's name when the process has ended or hangs.
    """

    def __init__(
        self,
        account: ByteAccount,
        failed: Callable[[str], object],
        strip: HeaderStrip,
        *,
        sort_tools: bool,
        keeps_turns: bool,
    ) -> None:
        self._account = account
        self._failed = failed
        self._settings = (strip, sort_tools, keeps_turns)
        self._pool: ProcessPoolExecutor | None = None

    async def read(
        self, tenant: str, plan: ReadPlan, body: bytes | bytearray, found: Found | None
    ) -> Reading | Named:
        """As `BodyReader.read`, and as `call`."""
        more_bytes = 0 if found is None else found.size_bytes
        reading, changed = await self.call(tenant, body, _read, plan, found, more_bytes=more_bytes)
        return reading if isinstance(reading, Named) else structs.replace(reading, body=changed)

    async def call(
        self,
        tenant: str,
        body: bytes | bytearray,
        function: Callable[..., tuple[Any, bytes | None]],
        *values: Any,
        more_bytes: int = 0,
    ) -> tuple[Any, bytes | None]:
        """The result of `function(body, *values)`: a small value, and bytes of any number.

        more_bytes: the size of the values. Raises what the function raises, and BalancerError 503
        without room or if the process fails.
        """
        hold = self._account.hold(tenant)
        if not hold.take_up_to(len(body) + more_bytes):
            raise no_memory()
        pool, loop = self._started(), asyncio.get_running_loop()
        file = FileIO(os.memfd_create("body"), "r+")
        try:
            async with asyncio.timeout(READING_S):
                await asyncio.to_thread(_write, file, body)
                result, has_bytes = await loop.run_in_executor(
                    pool, _call, file.fileno(), function, *values
                )
                return result, await asyncio.to_thread(_content, file) if has_bytes else None
        except (BrokenProcessPool, TimeoutError) as error:
            if pool is self._pool:
                log.error("the process that reads large bodies failed: %r", error)
                self._failed("large_bodies")
                self.close()
            message = "This large request could not be read; retry later."
            unavailable = HTTPStatus.SERVICE_UNAVAILABLE
            raise BalancerError(unavailable, message, _RETRY_AFTER_S) from None
        finally:
            file.close()
            hold.release()

    def close(self) -> None:
        """Ends the process. The next body starts another one."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():  # the balancer has no others
                process.kill()

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # A fork would share the balancer's sockets.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, context, _begin, self._settings)
        return self._pool


_reader: BodyReader


def _begin(strip: HeaderStrip, sort_tools: bool, keeps_turns: bool) -> None:
    """Prepares the process."""
    global _reader
    _reader = BodyReader(strip, sort_tools=sort_tools, keeps_turns=keeps_turns)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the balancer decides when it ends
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only started by the balancer"
    parent.join()
    os._exit(1)


def _call(
    descriptor: int, function: Callable[..., tuple[Any, bytes | None]], *values: Any
) -> tuple[Any, bool]:
    """Reads the body in a file of the balancer's, and writes the bytes of the result there."""
    with open(f"/proc/{os.getppid()}/fd/{descriptor}", "r+b", buffering=0) as file:
        result, content = function(_content(file), *values)
        if content is not None:
            file.truncate(0)
            _write(file, content)
    return result, content is not None


def _read(body: bytes, plan: ReadPlan, found: Found | None) -> tuple[Reading | Named, bytes | None]:
    reading = _reader.read(plan, body, found)
    if isinstance(reading, Named):
        return reading, None
    stripped = reading.stripped._replace(body=_short_values(reading.stripped.body))
    return structs.replace(reading, stripped=stripped, body=None), reading.body


def _write(file: FileIO, body: bytes | bytearray) -> None:
    file.seek(0)
    with memoryview(body) as view:
        written = 0
        while written < len(view):
            written += file.write(view[written:])


def _content(file: FileIO) -> bytes:
    file.seek(0)
    return file.read()


def _short_values(document: Any) -> Any:
    """What a document says about itself: its fields that are short texts, numbers and such."""
    if not isinstance(document, dict):
        return None
    return {
        key: value
        for key, value in document.items()
        if not isinstance(value, dict | list)
        and not (isinstance(value, str) and len(value) > _SHORT_CHARS)
    }
