"""From Kubernetes EndpointSlices to workers. Pure.

A service's pods are in several slices. The control plane moves a pod from one to another, and for a
moment it is in both, so an entry can be older than another of the same pod:

    entries of a pod              its worker
    one terminates, one serves    draining: a pod that terminates never becomes ready again
    one terminates, none serves   none
    one is ready                  ready
    else                          none

A worker's id is POD@UID. An endpoint that is no pod, such as a host that somebody entered by hand,
has no identity but its address: its id is HOST:PORT.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from sgl_ext.membership.member import Member, State

ANY_PORT = ""
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
