"""The source that is a Kubernetes cluster: the EndpointSlices of a service.

A list, and then a watch that goes on from the list's resource version:

    list ----> watch ----> watch ...   the server ends each after WATCH_S: go on from the last event
      ^          |  410 Gone: the server has forgotten that version
      +----------+

A connection that fails ends the iterator, and the next one goes on from the last event as well.

A `SliceSelector` says which EndpointSlices a source follows, as the operator writes it after
`kubernetes:`.

    engines                              the service in the balancer's own namespace
    serving/engines:http                 a namespace, and the port's name or number
    serving/?selector=app=engine,tier=a  the slices with these labels, of any service
    engines?api=v1beta1                  for clusters before 1.21

`find_members` makes workers of EndpointSlices. Pure. A service's pods are in several slices. The
control plane moves a pod from one to another, and for a moment it is in both, so an entry can be
older than another of the same pod:

    entries of a pod              its worker
    one terminates, one serves    draining: a pod that terminates never becomes ready again
    one terminates, none serves   none
    one is ready                  ready
    else                          none

A worker's id is POD@UID. An endpoint that is no pod, such as a host that somebody entered by hand,
has no identity but its address: its id is HOST:PORT.
"""

import logging
import random
import re
from asyncio import get_running_loop, sleep
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from http import HTTPStatus
from typing import Any, NamedTuple, NoReturn, Self
from urllib.parse import parse_qsl

import httpx2
import msgspec
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.core.exceptions import ConfigError

from sgl_ext.membership.member import Member, MembershipError, State

FORM = "[NAMESPACE/]SERVICE[:PORT][?selector=LABELS&api=v1beta1]"
VERSIONS = ("v1", "v1beta1")
ANY_PORT = ""
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
_SERVICE_LABEL = "kubernetes.io/service-name"
_PARTS = re.compile(r"(?:(?P<namespace>[^/:?]*)/)?(?P<service>[^/:?]*)(?::(?P<port>[^/:?]*))?\Z")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")


class SliceSelector(msgspec.Struct, frozen=True, kw_only=True):
    """namespace: empty: the balancer's own."""

    namespace: str
    labels: str
    port: str = ANY_PORT
    api: str = "v1"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises MembershipError."""
        path, _, query = text.partition("?")
        parts = _PARTS.match(path)
        if parts is None:
            raise MembershipError(f"must be kubernetes:{FORM}")
        options = dict(parse_qsl(query, keep_blank_values=True))
        selector, api = options.pop("selector", ""), options.pop("api", "v1")
        if options:
            raise MembershipError(f"{next(iter(options))}: is no option; selector and api are")
        if api not in VERSIONS:
            raise MembershipError(f"api={api!r}: must be {' or '.join(VERSIONS)}")
        service = parts["service"]
        if bool(service) == bool(selector):
            raise MembershipError("must name a service, or selector=LABELS in its place")
        for what in ("namespace", "service", "port"):
            if parts[what] and not _NAME.match(parts[what]):
                raise MembershipError(f"{what} {parts[what]!r}: is no name that Kubernetes allows")
        return cls(
            namespace=parts["namespace"] or "",
            labels=selector or f"{_SERVICE_LABEL}={service}",
            port=parts["port"] or ANY_PORT,
            api=api,
        )


_DEFAULT_PORT = "http"
_HOSTNAME = "kubernetes.io/hostname"
_ZONE = "topology.kubernetes.io/zone"


class Conditions(msgspec.Struct, frozen=True):
    """ready: None if it is not known, which the API says to take as ready. serving: the same
    whether the pod terminates or not; None: as ready."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Reference(msgspec.Struct, frozen=True):
    name: str = ""
    uid: str = ""


class Endpoint(msgspec.Struct, frozen=True, rename="camel"):
    """topology: where v1beta1 has the node and the zone."""

    addresses: tuple[str, ...] | None = None
    conditions: Conditions | None = None
    target_ref: Reference | None = None
    node_name: str | None = None
    zone: str | None = None
    topology: dict[str, str] | None = None


class Port(msgspec.Struct, frozen=True):
    name: str | None = None
    port: int | None = None


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    resource_version: str = ""


class EndpointSlice(msgspec.Struct, frozen=True, rename="camel"):
    """What is read of an EndpointSlice, of discovery.k8s.io/v1 as of v1beta1."""

    metadata: Metadata
    address_type: str = "IPv4"
    endpoints: tuple[Endpoint, ...] | None = None
    ports: tuple[Port, ...] | None = None


class Found(NamedTuple):
    """The workers, by id, and a sentence for each thing that keeps endpoints from being workers."""

    members: tuple[Member, ...]
    problems: tuple[str, ...]


def find_members(slices: Iterable[EndpointSlice], port: str = ANY_PORT) -> Found:
    """The workers of some slices.

    port: the name or the number of the port that the engines listen on. ANY_PORT: the only one, or
        of several the one that is named "http".
    """
    pods: dict[str, list[_Entry]] = {}
    problems: list[str] = []
    count = 0
    # A pod with addresses of both families is reached by IPv4. Names only make the order stable.
    for each in sorted(slices, key=lambda one: (one.address_type, one.metadata.name)):
        endpoints = [(one, one.addresses[0]) for one in each.endpoints or () if one.addresses]
        count += len(endpoints)
        number = _port_number(each.ports or (), port)
        if isinstance(number, str):
            if endpoints:
                problems.append(f"EndpointSlice {each.metadata.name} {number}")
            continue
        for endpoint, host in endpoints:  # further addresses are those of the same pod
            address = f"[{host}]:{number}" if each.address_type == "IPv6" else f"{host}:{number}"
            entry = _Entry(endpoint, address)
            pods.setdefault(_identity(entry), []).append(entry)
    members = []
    for identity, entries in sorted(pods.items()):
        if (state := _state(entries)) is not None:
            (endpoint, address), *_ = entries
            url = f"http://{address}"
            members.append(Member(id=identity, url=url, labels=_labels(endpoint), state=state))
    if not members and not problems:
        problems.append(f"{count} endpoints, none ready" if count else "no endpoints")
    return Found(tuple(members), tuple(problems))


class _Entry(NamedTuple):
    endpoint: Endpoint
    address: str


def _identity(entry: _Entry) -> str:
    target = entry.endpoint.target_ref
    return f"{target.name}@{target.uid}" if target is not None and target.uid else entry.address


def _state(entries: Iterable[_Entry]) -> State | None:
    """None: it is no worker."""
    conditions = [entry.endpoint.conditions or Conditions() for entry in entries]
    if leaving := [each for each in conditions if each.terminating]:
        return "draining" if any(_serves(each) for each in leaving) else None
    return "ready" if any(each.ready is not False for each in conditions) else None


def _serves(conditions: Conditions) -> bool:
    known = conditions.ready if conditions.serving is None else conditions.serving
    return known is not False


def _port_number(ports: tuple[Port, ...], wanted: str) -> int | str:
    """The port, or what is wrong."""
    numbers = {each.name or "": each.port for each in ports if each.port is not None}
    if wanted.isdecimal():
        # A slice without ports is that of a headless service that names none: all are open.
        if not numbers or int(wanted) in numbers.values():
            return int(wanted)
    elif wanted:
        if wanted in numbers:
            return numbers[wanted]
    elif len(numbers) == 1:
        return next(iter(numbers.values()))
    elif _DEFAULT_PORT in numbers:
        return numbers[_DEFAULT_PORT]
    if not numbers:
        return "has no ports: name the port by its number"
    names = ", ".join(f"{name or '(no name)'}={number}" for name, number in numbers.items())
    return f"has no port {wanted} among {names}" if wanted else f"has several ports: {names}"


def _labels(endpoint: Endpoint) -> dict[str, str]:
    topology = endpoint.topology or {}
    target = endpoint.target_ref
    found = {
        "pod": None if target is None else target.name,
        "node": endpoint.node_name or topology.get(_HOSTNAME),
        "zone": endpoint.zone or topology.get(_ZONE),
    }
    return {name: value for name, value in found.items() if value}


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
