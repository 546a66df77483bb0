"""A stand-in for the Kubernetes API: lists and watches of EndpointSlices, as kube-apiserver has.

What it serves is valid by Kubernetes' own schemas. It numbers changes, keeps them for watches that
resume, forgets them when it is compacted, and ends or cuts connections when it is told to.
"""

from __future__ import annotations

import asyncio
import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
from aiohttp import web
from kubernetes_validate import utils

# The library reads its schemas again for each object.
utils.schema_contents = cache(utils.schema_contents)
API = "1.33"  # of the schemas
SERVICE = "kubernetes.io/service-name"

Object = dict[str, Any]


def endpoint(
    pod: str | None = "engine-0",
    address: str = "10.0.0.1",
    *,
    uid: str = "",
    ready: bool | None = True,
    serving: bool | None = True,
    terminating: bool | None = False,
    node: str | None = "node-a",
    zone: str | None = "zone-a",
) -> Object:
    """An endpoint; of a pod unless `pod` is None. A condition that is None is not stated."""
    stated = {"ready": ready, "serving": serving, "terminating": terminating}
    made: Object = {
        "addresses": [address],
        "conditions": {name: value for name, value in stated.items() if value is not None},
    }
    if node is not None:
        made["nodeName"] = node
    if zone is not None:
        made["zone"] = zone
    if pod is not None:
        made["targetRef"] = {"kind": "Pod", "namespace": "serving", "name": pod}
        made["targetRef"]["uid"] = uid or f"uid-of-{pod}"
    return made


HTTP = ({"name": "http", "port": 30000, "protocol": "TCP"},)


def endpoint_slice(
    *endpoints: Object,
    name: str = "engines-a1",
    service: str = "engines",
    ports: Any = HTTP,
    family: str = "IPv4",
    labels: Any = None,
) -> Object:
    """An EndpointSlice of discovery.k8s.io/v1."""
    made: Object = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "namespace": "serving",
            "labels": {SERVICE: service, **(labels or {})},
            "managedFields": [{"manager": "kube-controller-manager", "operation": "Update"}],
        },
        "addressType": family,
        "endpoints": list(endpoints),
    }
    if ports is not None:
        made["ports"] = list(ports)
    kubernetes_validate.validate(made, API, strict=True)
    return made


def in_version(made: Object, version: str) -> Object:
    """The same slice in another version of the API."""
    made = copy.deepcopy(made)
    made["apiVersion"] = f"discovery.k8s.io/{version}"
    if version == "v1beta1":
        for each in made["endpoints"]:
            topology = {
                "kubernetes.io/hostname": each.pop("nodeName", None),
                "topology.kubernetes.io/zone": each.pop("zone", None),
            }
            each["topology"] = {name: value for name, value in topology.items() if value}
    return made


def write_kubeconfig(
    path: Path, server: str, token: str = "secret", certificate: Path | None = None
) -> None:
    """A kubeconfig whose own namespace is `serving`."""
    cluster: Object = {"server": server}
    if certificate is not None:
        cluster["certificate-authority"] = str(certificate)
    context = {"cluster": "c", "user": "u", "namespace": "serving"}
    made = {
        "clusters": [{"name": "c", "cluster": cluster}],
        "contexts": [{"name": "c", "context": context}],
        "users": [{"name": "u", "user": {"token": token}}],
        "current-context": "c",
    }
    path.write_text(json.dumps(made))  # which is YAML


class KubernetesApi:
    """The API of one cluster.

    seen: the query of each request. refusals: status and message of the next answers. versions: of
    discovery.k8s.io that it serves. page: the most slices of a page. gone_in_stream: whether 410 is
    an event of the watch or its status. page_is_gone: the next page of a list is answered by 410.
    """

    def __init__(self) -> None:
        self.version = 1000
        self.oldest = 0
        self.slices: dict[str, Object] = {}
        self.seen: list[dict[str, str]] = []
        self.refusals: list[tuple[int, str]] = []
        self.versions = ("v1", "v1beta1")
        self.page = 500
        self.gone_in_stream = True
        self.page_is_gone = False
        self._events: list[tuple[int, str, Object]] = []
        self._watches: list[asyncio.Queue[tuple[str, bytes]]] = []

    @property
    def lists(self) -> list[dict[str, str]]:
        return [query for query in self.seen if "watch" not in query]

    @property
    def watches(self) -> list[dict[str, str]]:
        return [query for query in self.seen if "watch" in query]

    def put(self, made: Object) -> None:
        """Adds or replaces a slice."""
        name = made["metadata"]["name"]
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self.slices[name] = made
        self._change(kind, made)

    def delete(self, name: str) -> None:
        self._change("DELETED", self.slices.pop(name))

    def bookmark(self, steps: int = 100) -> None:
        """Other objects change, and watches get to know the version."""
        self.version += steps
        bare = {"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1"}
        bare["metadata"] = {"resourceVersion": str(self.version), "creationTimestamp": None}  # type: ignore[assignment]
        self._send("BOOKMARK", bare)

    def compact(self) -> None:
        """Forgets all that has changed up to now."""
        self.version += 1
        self.oldest = self.version

    def raw(self, line: bytes) -> None:
        """Sends bytes to every watch."""
        self._tell("data", line)

    def end_watches(self) -> None:
        """Ends all watches as their timeout does."""
        self._tell("end", b"")

    def cut_watches(self, part: bytes = b'{"type":"MODIFIED","object":{"kind"') -> None:
        """Breaks the connections of all watches in the middle of an event."""
        self._tell("cut", part)

    def app(self) -> web.Application:
        app = web.Application()
        path = "/apis/discovery.k8s.io/{version}/namespaces/{namespace}/endpointslices"
        app.router.add_get(path, self._answer)
        return app

    def _tell(self, what: str, data: bytes) -> None:
        for watch in self._watches:
            watch.put_nowait((what, data))

    def _change(self, kind: str, made: Object) -> None:
        self.version += 1
        made["metadata"]["resourceVersion"] = str(self.version)
        self._events.append((self.version, kind, copy.deepcopy(made)))
        self._send(kind, made)

    def _send(self, kind: str, made: Object) -> None:
        self._tell(kind, json.dumps(made).encode())

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        self.seen.append(query)
        if self.refusals:
            return status(*self.refusals.pop(0))
        if (version := request.match_info["version"]) not in self.versions:
            return web.Response(status=404, text="404 page not found\n")
        wanted = dict(pair.split("=") for pair in query["labelSelector"].split(","))

        def is_wanted(made: Object) -> bool:
            return bool(wanted.items() <= made["metadata"]["labels"].items())

        if query.get("watch") == "true":
            return await self._watch(request, version, is_wanted)
        if request.match_info["namespace"] != "serving":
            found: list[Object] = []
        else:
            found = [one for _, one in sorted(self.slices.items()) if is_wanted(one)]
        start = int(query.get("continue", "0"))
        if start and self.page_is_gone:
            self.page_is_gone = False
            return status(410, "The provided continue parameter is too old")
        end = start + min(self.page, int(query["limit"]))
        metadata = {"resourceVersion": str(self.version)}
        if end < len(found):
            metadata["continue"] = str(end)
        items = [in_version(one, version) for one in found[start:end]]
        kind = {"kind": "EndpointSliceList", "apiVersion": f"discovery.k8s.io/{version}"}
        return web.json_response({**kind, "metadata": metadata, "items": items})

    async def _watch(
        self, request: web.Request, version: str, is_wanted: Any
    ) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        gone = "too old resource version"
        if since < self.oldest and not self.gone_in_stream:
            return status(410, gone)
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        if since < self.oldest:
            await _event(response, "ERROR", json.loads(status(410, gone).body))  # type: ignore[arg-type]
            return response
        sent: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        for number, kind, made in self._events:
            if number > since:
                sent.put_nowait((kind, json.dumps(made).encode()))
        self._watches.append(sent)
        try:
            while True:
                kind, data = await sent.get()
                if kind == "end":
                    return response
                if kind == "cut":
                    await response.write(data)
                    assert request.transport is not None
                    request.transport.close()
                    return response
                if kind == "data":
                    await response.write(data)
                elif kind == "BOOKMARK":
                    if request.query.get("allowWatchBookmarks") == "true":
                        await _event(response, kind, json.loads(data))
                elif is_wanted(made := json.loads(data)):
                    await _event(response, kind, in_version(made, version))
        finally:
            self._watches.remove(sent)


async def _event(response: web.StreamResponse, kind: str, made: Object) -> None:
    await response.write(json.dumps({"type": kind, "object": made}).encode() + b"\n")


def status(code: int, message: str) -> web.Response:
    made = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "code": code,
    }
    return web.json_response(made, status=code)
