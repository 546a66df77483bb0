"""`GET /metrics/engines`: every engine's own metrics in one page, with the label `engine`.

Engines listen on loopback, so a Prometheus elsewhere reads them here. All are read at once, within
a time and a size. An engine that does not answer is left out: `sgl_ext_engine_up` is 0 for it, and
`sgl_ext_engine_scrape_failures_total` counts it with the reason. The page also says how often the
launcher has started each engine again.
"""

import asyncio
import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from types import MappingProxyType

import aiohttp
from aiohttp import web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from sgl_ext.balancer.cluster.launcher import Launcher
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.balancer.routing.workers import Workers

# Prometheus waits for 10 s unless it is configured otherwise.
_TIMEOUT = aiohttp.ClientTimeout(total=5)
MOST_BYTES, MOST_BYTES_IN_ALL = 4 << 20, 64 << 20
_CHUNK_BYTES = 1 << 16
# The answer is not compressed, so that its size is what was read.
_HEADERS = {"accept": CONTENT_TYPE_PLAIN_0_0_4, "accept-encoding": "identity"}

_NAME = rb"[a-zA-Z_:][a-zA-Z0-9_:]*"
_NUMBER = rb"(?:[-+]?(?:\d[\d.]*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?[iI]nf|NaN)"
# Each begins with the end of the line before it, which is fast to search for.
_ABOUT = re.compile(rb"\n(# (?:HELP|TYPE) %b[^\n]*)" % _NAME)
_NO_SAMPLE = re.compile(rb"\n(?:#[^\n]*)?(?=\n|\Z)")
_LABELLED = re.compile(rb"\n%b\{" % _NAME)
_BARE = re.compile(rb"\n(%b)(?=[ \t])" % _NAME)
_END = re.compile(rb"[ \t]%b(?:[ \t]+-?\d+)?[ \t]*(?=\n|\Z)" % _NUMBER)

# An engine's own label of this name.
_OWN_LABEL = re.compile(rb'([{,])engine="')

UP = b"sgl_ext_engine_up"
UP_HELP = b"Whether the engine's metrics could be read for this page."
RESTARTS = b"sgl_ext_child_restarts_total"
RESTARTS_HELP = (
    b"Times that the launcher has started an engine of its node again, planned or not, by its name."
)


CRASHES = b"sgl_ext_child_crashes_total"
CRASHES_HELP = b"Times that an engine of the launcher's node ended without being stopped."


class Unreadable(Exception):
    """An engine's metrics cannot be used. The message is the reason, as a label."""


class EngineMetrics:
    """Reads the engines' metrics, once for all requests that come meanwhile."""

    def __init__(
        self,
        workers: Workers,
        session: aiohttp.ClientSession,
        metrics: Metrics,
        launcher: Launcher,
    ) -> None:
        self._workers = workers
        self._session = session
        self._launcher = launcher
        self._failures = metrics.engine_scrape_failures.counts
        self._reading: asyncio.Task[bytes] | None = None

    async def show(self, _: web.Request) -> web.Response:
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_all())
        page = await asyncio.shield(self._reading)
        return web.Response(body=page, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    async def _read_all(self) -> bytes:
        workers = {worker.id: worker for worker in self._workers.all if not worker.rank}
        left_bytes = [MOST_BYTES_IN_ALL]
        read = [self._read(worker, left_bytes) for worker in workers.values()]
        children, found = await asyncio.gather(self._launcher.children(), asyncio.gather(*read))
        pages = dict(zip(workers, found, strict=True))
        restarts = {child["name"]: child["restarts"] for child in children}
        crashes = {child["name"]: child.get("crashes", 0) for child in children}
        # In a thread: 64 engines' pages are about 10 MB.
        page, unreadable = await asyncio.to_thread(merge, pages, restarts, crashes)
        for _ in unreadable:
            self._failures[("unreadable",)] += 1
        return page

    async def _read(self, worker: Worker, left_bytes: list[int]) -> bytes | None:
        """An engine's page; None, which is counted, if it does not send one."""
        try:
            return await self._fetch(f"{worker.url}/metrics", left_bytes)
        except TimeoutError:
            reason = "timeout"
        except aiohttp.ClientError:
            reason = "connection"
        except Unreadable as unreadable:
            reason = str(unreadable)
        self._failures[(reason,)] += 1
        return None

    async def _fetch(self, url: str, left_bytes: list[int]) -> bytes:
        page = bytearray()
        async with self._session.get(
            url, timeout=_TIMEOUT, headers=_HEADERS, allow_redirects=False
        ) as response:
            if response.status != HTTPStatus.OK:
                raise Unreadable("status")
            async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                page += chunk
                left_bytes[0] -= len(chunk)
                if len(page) > MOST_BYTES or left_bytes[0] < 0:
                    left_bytes[0] += len(page)
                    raise Unreadable("too large")
        return bytes(page)


def merge(
    pages: Mapping[str, bytes | None],
    restarts: Mapping[str, int] = MappingProxyType({}),
    crashes: Mapping[str, int] = MappingProxyType({}),
) -> tuple[bytes, list[str]]:
    """One page for those of several engines, each family once, and the engines whose page cannot
    be read: one wrong line would make Prometheus reject the whole page.

    pages: in Prometheus' text format, by the engine's id; None for an engine without one.
    restarts, crashes: how often the launcher has started each of its engines again, and how often
        each ended without being stopped.
    """
    up, again = _Family(UP, b"gauge", UP_HELP), _Family(RESTARTS, b"counter", RESTARTS_HELP)
    ended = _Family(CRASHES, b"counter", CRASHES_HELP)
    families, unreadable = {UP: up, RESTARTS: again, CRASHES: ended}, []
    for family, counts in ((again, restarts), (ended, crashes)):
        name = RESTARTS if family is again else CRASHES
        for child, times in counts.items():
            family.samples.append(b'\n%b{child="%b"} %d' % (name, _escaped(child).encode(), times))
    for engine, page in pages.items():
        label = b'engine="%b"' % _escaped(engine).encode()
        is_up = False
        if page is not None:
            try:
                _add(families, list(_families_in(page, label)))
                is_up = True
            except Unreadable:
                unreadable.append(engine)
        up.samples.append(b"\n%b{%b} %d" % (UP, label, is_up))
    page = b"".join(part for family in families.values() for part in family.parts())
    return page[1:] + b"\n", unreadable


class _Family:
    """about: the lines HELP and TYPE, as the first engine states them."""

    def __init__(self, name: bytes = b"", kind: bytes = b"", text: bytes = b"") -> None:
        self.about: dict[bytes, bytes] = {}
        if name:
            self.about = {
                b"HELP": b"# HELP %b %b" % (name, text),
                b"TYPE": b"# TYPE %b %b" % (name, kind),
            }
        self.samples: list[bytes] = []

    def parts(self) -> Iterable[bytes]:
        if any(self.samples):
            yield from (b"\n%b" % line for line in self.about.values())
            yield from self.samples


def _families_in(page: bytes, label: bytes) -> Iterable[tuple[bytes, bytes]]:
    """The lines HELP and TYPE of a page, each with the samples between it and the next one; the
    samples have one label more. Raises Unreadable."""
    first, *parts = _ABOUT.split(b"\n" + page.strip(b"\n"))
    yield b"", _with_label(first, label)
    for about, samples in zip(parts[::2], parts[1::2], strict=True):
        yield about, _with_label(samples, label)


def _with_label(samples: bytes, label: bytes) -> bytes:
    if not samples:
        return samples
    if b"\n#" in samples or b"\n\n" in samples:
        samples = _NO_SAMPLE.sub(b"", samples)
    if b'engine="' in samples:  # as Prometheus itself renames a label
        samples = _OWN_LABEL.sub(rb'\1exported_engine="', samples)
    escaped = label.replace(b"\\", rb"\\")
    samples, labelled = _LABELLED.subn(rb"\g<0>%b," % escaped, samples)
    samples, bare = _BARE.subn(rb"\n\1{%b}" % escaped, samples)
    if not labelled + bare == samples.count(b"\n") == len(_END.findall(samples)):
        raise Unreadable
    return samples


def _add(families: dict[bytes, _Family], found: Iterable[tuple[bytes, bytes]]) -> None:
    """Adds a page's samples to their families. Those of one family follow its HELP and TYPE."""
    for about, samples in found:
        _, kind, name, *_ = about.split(b" ", 3) if about else (b"",) * 3
        family = families.setdefault(name, _Family())
        if about:
            family.about.setdefault(kind, about)
        family.samples.append(samples)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
