"""Which workers a set of EndpointSlices stands for."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from sgl_ext.integrations.kubernetes import EndpointSlice, Found, find_members
from tests.integrations.kubernetes.kubernetes_api import HTTP, endpoint, endpoint_slice, in_version

METRICS = {"name": "metrics", "port": 9090, "protocol": "TCP"}


def found(*slices: Any, port: str = "", version: str = "v1") -> Found:
    """What is found in slices as the API sends them."""
    sent = json.dumps([in_version(each, version) for each in slices])
    return find_members(msgspec.json.decode(sent, type=tuple[EndpointSlice, ...]), port)


@pytest.mark.parametrize(
    ("ready", "serving", "terminating", "state"),
    [
        (True, True, False, "ready"),
        (True, None, None, "ready"),  # before Kubernetes 1.20
        (None, None, None, "ready"),
        (False, True, True, "draining"),
        (False, False, True, None),
        # Such a service publishes addresses that are not ready: the pod terminates all the same.
        (True, True, True, "draining"),
        (True, None, True, "draining"),
        (False, None, True, None),
        (False, False, False, None),
        (False, True, False, None),
        (False, None, None, None),
    ],
)
@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_conditions_say_whether_a_pod_is_a_worker(
    ready: bool | None,
    serving: bool | None,
    terminating: bool | None,
    state: str | None,
    version: str,
) -> None:
    one = endpoint(ready=ready, serving=serving, terminating=terminating)
    members = found(endpoint_slice(one), version=version).members
    assert [member.state for member in members] == ([] if state is None else [state])


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_a_worker_is_identified_by_its_pod_and_knows_its_node(version: str) -> None:
    made = endpoint_slice(endpoint("engine-0", "10.0.0.1", uid="5b1c"))
    (member,) = found(made, version=version).members
    assert (member.id, member.url) == ("engine-0@5b1c", "http://10.0.0.1:30000")
    assert member.labels == {"pod": "engine-0", "node": "node-a", "zone": "zone-a"}


def test_a_pod_that_takes_the_address_of_another_is_another_worker() -> None:
    first = found(endpoint_slice(endpoint(uid="a"))).members
    second = found(endpoint_slice(endpoint(uid="b"))).members
    assert first[0].url == second[0].url
    assert first[0].id != second[0].id


def test_an_endpoint_that_is_no_pod_is_identified_by_its_address() -> None:
    made = endpoint_slice(endpoint(None, "192.0.2.7", node=None, zone=None))
    (member,) = found(made).members
    assert (member.id, member.labels) == ("192.0.2.7:30000", {})


@pytest.mark.parametrize("stale_first", [True, False])
@pytest.mark.parametrize(
    ("stale", "current", "state"),
    [
        ({"ready": True}, {"ready": True}, "ready"),
        ({"ready": False, "serving": False}, {"ready": True}, "ready"),
        ({"ready": True}, {"ready": False, "terminating": True}, "draining"),
        ({"ready": True}, {"ready": False, "serving": False, "terminating": True}, None),
    ],
)
def test_a_pod_in_two_slices_counts_once(
    stale_first: bool, stale: Any, current: Any, state: str | None
) -> None:
    old, new = ("a", "b") if stale_first else ("b", "a")
    slices = [
        endpoint_slice(endpoint(**stale), name=old),
        endpoint_slice(endpoint(**current), name=new),
    ]
    members = found(*slices).members
    assert [member.state for member in members] == ([] if state is None else [state])


def test_a_pod_with_addresses_of_both_families_counts_once() -> None:
    six = endpoint_slice(endpoint(address="fd00::1"), name="a", family="IPv6")
    four = endpoint_slice(endpoint(address="10.0.0.1"), name="b")
    assert [member.url for member in found(six).members] == ["http://[fd00::1]:30000"]
    assert [member.url for member in found(six, four).members] == ["http://10.0.0.1:30000"]


@pytest.mark.parametrize(
    ("ports", "wanted", "result"),
    [
        (HTTP, "", 30000),
        ([{"port": 8000}], "", 8000),
        ([METRICS, *HTTP], "", 30000),
        ([METRICS, *HTTP], "metrics", 9090),
        ([METRICS, *HTTP], "9090", 9090),
        ([METRICS, {"name": "grpc", "port": 1}], "", "has several ports: metrics=9090, grpc=1"),
        (HTTP, "grpc", "has no port grpc among http=30000"),
        (HTTP, "1", "has no port 1 among http=30000"),
        (None, "30000", 30000),
        ([], "30000", 30000),
        (None, "", "has no ports: name the port by its number"),
        ([{"name": "http"}], "http", "has no ports: name the port by its number"),
    ],
)
def test_the_port_is_named_numbered_or_the_only_one(
    ports: Any, wanted: str, result: int | str
) -> None:
    members, problems = found(endpoint_slice(endpoint(), ports=ports), port=wanted)
    if isinstance(result, int):
        assert [member.url for member in members] == [f"http://10.0.0.1:{result}"]
        assert problems == ()
    else:
        assert members == ()
        assert problems == (f"EndpointSlice engines-a1 {result}",)


def test_slices_without_a_worker_say_why() -> None:
    assert found(endpoint_slice()).problems == ("no endpoints",)
    waiting = endpoint_slice(endpoint(ready=False), endpoint("engine-1", ready=False))
    assert found(waiting).problems == ("2 endpoints, none ready",)
    assert found(endpoint_slice(endpoint())).problems == ()
