"""The actor of one engine: it runs the engine's process on its node, and says so in Ray's GCS.

    created by Ray --> start a process --> it ends --> pause --> start another one
                       drain: say so --> no balancer uses it --> stop it --> remove the entry

Ray creates the actor again on another node when its node dies, with the same order. The process
ends with the actor: it holds a pipe from it.
"""

import asyncio
import logging
import os
import secrets
import time
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import ray
from msgspec.structs import replace

from sgl_ext.integrations.ray.plan import SECRET, Order
from sgl_ext.integrations.ray.source import RENEWED_S, Entry, Gcs, engines_key
from sgl_ext.membership.member import Member, MembershipError, State
from sgl_ext.node import hardware
from sgl_ext.node.child import Child
from sgl_ext.node.failure import reason_of
from sgl_ext.node.flags import ports_beside
from sgl_ext.node.log_dir import new_log, rotated
from sgl_ext.ports import free_ports, reachable
from sgl_ext.supervision import supervise
from sgl_ext.wire.events import SUBSCRIBERS_PATH, read_subscribers
from sgl_ext.wire.headers import SECRET_HEADER

log = logging.getLogger(__name__)

PORTS = range(20_000, 30_000)
"""Engines listen on one of these: below the ports that systems give to outgoing connections."""
STOP_S = 20.0
_PAUSE_S = 5.0
_LOOK_S = 1.0
_ROTATE_S = 5.0
# A balancer that reconnects has no subscription for half a second.
_QUIET_LOOKS = 3
_TIMEOUT = aiohttp.ClientTimeout(total=5)


class EngineHost:
    """An async actor. Its methods may be called at the same time, and again."""

    async def __init__(self, order: bytes) -> None:  # type: ignore[misc]  # Ray awaits it
        """order: an `Order`, as JSON."""
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        self._order = msgspec.json.decode(order, type=Order)
        context = ray.get_runtime_context()
        fleet, name = self._order.settings.ray_fleet, self._order.name
        self._gcs = await Gcs.connect(context.gcs_address)
        self._key = engines_key(fleet, name)
        # Its public functions have another idea of the address, and none of the folder.
        node = ray._private.worker.global_worker.node
        self._host = node.node_ip_address
        # Ray's tools show what is in this folder, too.
        self._log = new_log(Path(node.get_logs_dir_path()) / f"sgl-ext-{fleet}-{name}.log")
        self._labels = {"node": context.get_node_id(), "host": self._host}
        secret = self._order.secret
        self._headers = {} if secret is None else {SECRET_HEADER: secret.split()[0]}
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=_TIMEOUT)
        self._child: Child | None = None
        self._has_served = False
        self._entry = Entry(
            member=None,
            node=self._host,
            generation=self._order.generation,
            settings=self._order.digest,
        )
        self._state: State = "ready"
        if self._order.platform is None:
            # Ray sets it to the number of CPUs that the actor holds, which is 0.
            os.environ.pop("OMP_NUM_THREADS", None)
        self._tasks = [
            asyncio.create_task(supervise(name, _logged, step, pause_s))
            for name, step, pause_s in (
                ("engine", self._live, _PAUSE_S),
                ("probe", self._probe, _LOOK_S),
                ("entry", self._renew, RENEWED_S),
                ("log", self._rotate, _ROTATE_S),
            )
        ]

    async def drain(self) -> None:
        """Returns once no balancer uses the engine, or after `ray-drain-s`; then it has ended."""
        self._state = "draining"
        deadline = time.monotonic() + self._order.settings.ray_drain_s
        is_known, quiet = await self._note(), 0
        while quiet < _QUIET_LOOKS and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
            is_known = is_known or await self._note()
            quiet = quiet + 1 if is_known and not await self._is_used() else 0
        await self.end()

    async def end(self) -> None:
        """Stops the engine, and removes its entry."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._child is not None:
            await self._child.stop(STOP_S)
        await self._gcs.delete(self._key)

    async def _live(self) -> None:
        """One engine process, from its start to its end."""
        order = self._order
        child, member = self._new_child()
        self._child, self._has_served = child, False
        await child.start()
        log.info("started %s at %s", member.id, member.url)
        await self._note(member=member, ready=False)
        code = await child.wait()
        failure = ""
        if not self._has_served:
            failure = f"{order.name} ended with exit code {code} on {self._host}:\n"
            failure += reason_of(child)
        log.warning("%s ended with exit code %s", member.id, code)
        await self._note(member=None, ready=False, failure=failure)

    def _new_child(self) -> tuple[Child, Member]:
        order = self._order
        settings = replace(order.settings, engine_host=self._host)
        found = hardware.Hardware((), order.platform)
        # Two actors on a node must not find the same port free, so each begins somewhere else.
        first = secrets.choice(PORTS)
        (port,) = free_ports(first, 1, self._host, ports_beside(settings.engine_args))
        command = hardware.engine_command(settings, found, port)
        environment = hardware.engine_environment(settings, found, 0)
        if order.secret is not None:
            environment[SECRET] = order.secret
        url = f"http://{reachable(self._host, port)}"
        name = f"{order.name}-{secrets.token_hex(4)}"
        member = Member(id=name, url=url, model=settings.model_name, labels=self._labels)
        return Child(order.name, command, environment, self._log, url), member

    async def _probe(self) -> None:
        """Notes whether the engine serves."""
        member = self._entry.member
        if member is None:
            return
        ready = await self._status(f"{member.url}/ready") == HTTPStatus.OK
        if ready is not self._entry.ready and member == self._entry.member:
            self._has_served = self._has_served or ready
            await self._note(ready=ready, failure="" if ready else self._entry.failure)

    async def _is_used(self) -> bool:
        """Whether a balancer lists the engine. One that does not answer is used, unless it has
        ended or has never served."""
        member = self._entry.member
        if member is None or not self._has_served:
            return False
        with suppress(aiohttp.ClientError, TimeoutError, KeyError, ValueError):
            async with self._session.get(member.url + SUBSCRIBERS_PATH) as answer:
                return read_subscribers(await answer.read()) > 0
        return True

    async def _status(self, url: str) -> int | None:
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.get(url) as answer:
                return answer.status
        return None

    async def _rotate(self) -> None:
        limit_bytes = self._order.settings.log_limit_bytes
        if not await asyncio.to_thread(rotated, self._log, limit_bytes):
            log.warning("%s was emptied, as its disk has no room for a copy", self._log)

    async def _note(self, **changes: Any) -> bool:
        """Changes the entry and writes it; whether the GCS has it now. If it does not answer, the
        engine goes on, and a renewal writes the entry."""
        self._entry = replace(self._entry, **changes)
        try:
            await self._renew()
        except MembershipError as error:
            log.warning("%s", error)
            return False
        return True

    async def _renew(self) -> None:
        """Writes the entry. Raises MembershipError."""
        entry = replace(self._entry, renewal=self._entry.renewal + 1)
        if entry.member is not None:
            entry = replace(entry, member=replace(entry.member, state=self._state))
        self._entry = entry
        await self._gcs.put(self._key, msgspec.json.encode(entry))


def _logged(task: str) -> None:
    """Failures of a task are not counted: an actor has no metrics; its log has the reason."""
