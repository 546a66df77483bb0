"""The source that is a Kubernetes cluster: the EndpointSlices of a service.

A list, and then a watch that goes on from the list's resource version:

    list ----> watch ----> watch ...   the server ends each after WATCH_S: go on from the last event
      ^          |  410 Gone: the server has forgotten that version
      +----------+

A connection that fails ends the iterator, and the next one goes on from the last event as well.
"""

import logging
import random
from asyncio import get_running_loop, sleep
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from http import HTTPStatus
from typing import Any, NoReturn

import httpx2
import msgspec
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.core.exceptions import ConfigError

from sgl_ext.membership.endpoint_slices import EndpointSlice, find_members
from sgl_ext.membership.member import Member, MembershipError
from sgl_ext.membership.slice_selector import SliceSelector

log = logging.getLogger(__name__)
logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs each request

# The server ends a watch after this time. One that is silent for longer is dead.
WATCH_S = 30
_SILENCE_S = 10.0
_CONNECT_S = 10.0
# A watch that ends sooner is followed by a pause.
_SHORTEST_WATCH_S = 1.0
_LONGEST_BACKOFF_S = 30.0
# etcd stores at most 1.5 MiB of an object, which is more in JSON.
_LINE_BYTES = 8 << 20
_PAGE = 20
_PAGE_BYTES = 64 << 20
_ERROR_BYTES = 64 << 10
_MESSAGE_CHARACTERS = 500
_LIMIT_SLICES = 1000
_RULE = "apiGroups: [discovery.k8s.io], resources: [endpointslices], verbs: [list, watch]"


class _Status(msgspec.Struct):
    """What the API answers in place of an object."""

    code: int = 0
    message: str = ""


class _ListMetadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class _SliceList(msgspec.Struct):
    metadata: _ListMetadata
    items: tuple[EndpointSlice, ...] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Gone(Exception):
    """The server has forgotten the resource version."""


class KubernetesSlices:
    """Follows EndpointSlices. It resumes where it was when its iterator failed."""

    def __init__(self, name: str, text: str) -> None:
        """Raises MembershipError if `text` is wrong, or nothing says where the cluster is."""
        self.name = name
        self._selector = SliceSelector.parse(text)
        self._config = _cluster()
        self._namespace = self._selector.namespace or self._config.namespace
        self._path = f"/apis/discovery.k8s.io/{self._selector.api}/namespaces/{self._namespace}"
        self._slices: dict[str, EndpointSlice] = {}
        self._version = ""
        self._problems: tuple[str, ...] = ()
        self._failures = 0

    async def lists(self) -> AsyncIterator[tuple[Member, ...]]:
        if self._failures > 1:
            longest = min(_LONGEST_BACKOFF_S, 2.0 ** min(self._failures, 10) / 2)
            await sleep(longest * random.uniform(0.5, 1))
        timeout = httpx2.Timeout(WATCH_S + _SILENCE_S, connect=_CONNECT_S)
        last = None
        try:
            async with AsyncClient(self._config, ConnectionParams(timeout=timeout)) as client:
                async for _ in self._follow(client):
                    self._failures = 0
                    if (members := self._members()) != last:
                        yield members
                    last = members
        except (httpx2.HTTPError, httpx2.InvalidURL, ConfigError, OSError) as error:
            self._failures += 1
            reason = str(error) or type(error).__name__
            raise MembershipError(f"{self._config.cluster.server}: {reason}") from None
        except MembershipError:
            self._failures += 1
            raise

    async def _follow(self, client: httpx2.AsyncClient) -> AsyncIterator[None]:
        """Yields whenever the slices are known to be those of the server, or have changed."""
        clock = get_running_loop().time
        while True:
            began_s = clock()
            try:
                if not self._version:
                    await self._list(client)
                    yield
                async for _ in self._watch(client):
                    yield
            except _Gone:
                self._version = ""
            await sleep(max(0.0, _SHORTEST_WATCH_S - (clock() - began_s)))

    async def _list(self, client: httpx2.AsyncClient) -> None:
        """Replaces all slices, page by page."""
        found: dict[str, EndpointSlice] = {}
        page = ""
        while True:
            query = {"limit": _PAGE, **({"continue": page} if page else {})}
            async with self._get(client, query) as response:
                await self._check(response)
                body = await _read(response, _PAGE_BYTES)
            try:
                answer = msgspec.json.decode(body, type=_SliceList)
            except msgspec.MsgspecError as error:
                raise MembershipError(f"the list of EndpointSlices is malformed: {error}") from None
            found.update((each.metadata.name, each) for each in answer.items or ())
            _check_count(found)
            page = answer.metadata.continue_
            if not page:
                break
        self._slices, self._version = found, answer.metadata.resource_version

    async def _watch(self, client: httpx2.AsyncClient) -> AsyncIterator[None]:
        """One watch, until the server ends it. Raises _Gone."""
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": WATCH_S,
        }
        async with self._get(client, query) as response:
            await self._check(response)
            yield
            buffer = bytearray()
            async for part in response.aiter_bytes():
                buffer += part
                if b"\n" not in part:
                    if len(buffer) > _LINE_BYTES:
                        raise MembershipError(f"an event of the watch is over {_LINE_BYTES} bytes")
                    continue
                *lines, rest = bytes(buffer).split(b"\n")
                buffer = bytearray(rest)
                for line in filter(None, lines):
                    self._apply(line)
                yield
            # A rest is an event that was cut off. The next watch gets it again.

    def _apply(self, line: bytes) -> None:
        """Applies one event of a watch. After one that is not understood, all is listed again."""
        try:
            event = msgspec.json.decode(line, type=_Event)
            if event.type == "ERROR":
                self._version = ""
                _refuse(msgspec.json.decode(event.object, type=_Status))
            changed = msgspec.json.decode(event.object, type=EndpointSlice)
        except msgspec.MsgspecError as error:
            self._version = ""
            raise MembershipError(f"an event of the watch is malformed: {error}") from None
        if event.type in ("ADDED", "MODIFIED"):
            self._slices[changed.metadata.name] = changed
            _check_count(self._slices)
        elif event.type == "DELETED":
            self._slices.pop(changed.metadata.name, None)
        self._version = changed.metadata.resource_version  # also of a BOOKMARK, which has no more

    def _members(self) -> tuple[Member, ...]:
        members, problems = find_members(self._slices.values(), self._selector.port)
        if not self._slices:
            where = f"in the namespace {self._namespace}"
            problems = (f"no EndpointSlice {where} has the labels {self._selector.labels}",)
        for problem in problems:
            if problem not in self._problems:
                log.warning("%s: %s", self.name, problem)
        self._problems = problems
        return members

    def _get(
        self, client: httpx2.AsyncClient, query: Mapping[str, object]
    ) -> AbstractAsyncContextManager[httpx2.Response]:
        whole: Any = {"labelSelector": self._selector.labels, **query}
        return client.stream("GET", f"{self._path}/endpointslices", params=whole)

    async def _check(self, response: httpx2.Response) -> None:
        """Raises _Gone, or MembershipError if the answer is an error."""
        if response.status_code == HTTPStatus.OK:
            return
        status = _Status(response.status_code, response.reason_phrase)
        with suppress(msgspec.MsgspecError):
            body = await _read(response, _ERROR_BYTES)
            status = msgspec.json.decode(body, type=_Status)
        hints: dict[int, str] = {
            HTTPStatus.FORBIDDEN: f"a Role in the namespace {self._namespace} must allow {_RULE}",
            HTTPStatus.NOT_FOUND: f"it may not serve discovery.k8s.io/{self._selector.api}",
        }
        _refuse(_Status(response.status_code, status.message), hints.get(response.status_code, ""))


def _refuse(status: _Status, hint: str = "") -> NoReturn:
    if status.code == HTTPStatus.GONE:
        raise _Gone
    said = f"the API server answers {status.code}, {status.message[:_MESSAGE_CHARACTERS]!r}"
    raise MembershipError(f"{said}: {hint}" if hint else said)


def _check_count(slices: Collection[str]) -> None:
    if len(slices) > _LIMIT_SLICES:
        problem = f"over {_LIMIT_SLICES} EndpointSlices have the labels: select fewer"
        raise MembershipError(problem)


async def _read(response: httpx2.Response, limit: int) -> bytes:
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > limit:
            raise MembershipError(f"an answer of the API server is over {limit} bytes")
    return bytes(body)


def _cluster() -> SingleConfig:
    """That of this pod, else that of the kubeconfig. Raises MembershipError."""
    try:
        config = KubeConfig.from_env().get()
    except Exception as error:  # a kubeconfig can be wrong in many ways
        reason = f"{type(error).__name__}: {error}"
        where = "this is no pod with a service account, and no kubeconfig can be read"
        raise MembershipError(f"no cluster: {where}: {reason}") from None
    assert config is not None, "only a default can be None"
    return config
