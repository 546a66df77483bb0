"""Probes of the workers: which of them are ready, hang, or work again."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

import aiohttp
import msgspec
import orjson

from scheduler.silence import HANG_S, LOOK_S, Signs, is_waited_for
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.balancer.routing.workers import Workers, can_answer
from sgl_ext.protocols.models import NOT_STATED, StatedModel, read_stated
from sgl_ext.protocols.models import PATH as MODELS_PATH
from sgl_ext.supervision import Failed, supervise
from sgl_ext.wire.headers import PURPOSE_HEADER, RANK_HEADER
from sgl_ext.wire.probes import READY_PATH, WORK_PATH, read_probe, read_signs

log = logging.getLogger(__name__)

_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=10)
# So many probes in a row that an engine accepted and left without an answer show that it hangs.
SILENT_PROBES = 3
_TOKEN = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
# A request that was sent so long after an engine's last sign of life is not what it does.
SENT_LATE_S = 1.0
MODELS_S = 10.0
"""How often the balancer requests the model and adapters of a ready worker."""
PROBE = "probe"
_MODELS_TIMEOUT = aiohttp.ClientTimeout(total=2)
_GENERATE_TIMEOUT = aiohttp.ClientTimeout(total=30)


@dataclass(frozen=True, eq=False)
class WorkerProbes:
    """Probes every worker once an interval, each in a task of its own: none delays another.

    failed: called with the task's name when a probe raises; the next one is made all the same.
    compile_timeout_s: as `BalancerSettings.compile_timeout_s`.
    stated: called with what a worker states of its model; None: they are not asked.
    """

    workers: Workers
    session: aiohttp.ClientSession
    failed: Failed
    interval_s: float = 1.0
    compile_timeout_s: float = 600.0
    stated: Callable[[Worker, StatedModel], None] | None = None
    clock: Callable[[], float] = time.monotonic
    _stalled: set[Worker] = field(default_factory=set, init=False)

    async def run(self) -> None:
        """Probes until cancelled."""
        probing: dict[Worker, asyncio.Task[None]] = {}
        try:
            while True:
                for worker in probing.keys() - self.workers.all:
                    probing.pop(worker).cancel()
                    self._stalled.discard(worker)
                for worker in self.workers.all:
                    if worker not in probing:
                        probe = partial(self.probe, worker)
                        probing[worker] = asyncio.create_task(
                            supervise("probe", self.failed, probe, self.interval_s)
                        )
                await asyncio.sleep(self.interval_s)
        finally:
            for task in probing.values():
                task.cancel()

    async def probe(self, worker: Worker) -> None:
        """Asks a worker if it is ready. A worker that is silent without a sign of work, or whose
        requests keep failing, must also generate a token."""
        if worker.is_hung or not await self._is_waited_for(worker):
            self._set_hung(worker, not await self._shows_life(worker))
        elif worker.ready and worker.breaker.wants_trial(self.clock()):
            await self._try_breaker(worker)
        if worker.is_hung:
            return
        probed_s = self.clock()
        try:
            status, head, cause = await self._ready(worker)
        except TimeoutError:
            status, cause = None, f"no answer for {_PROBE_TIMEOUT.total:g} s"
            worker.silent_probes += 1
        else:
            worker.silent_probes = 0
            said = read_probe(head)
            worker.settings_number = said.settings_number
            if status == HTTPStatus.OK:
                self.workers.set_role(worker, said.role)
                await self._ask_model(worker)
                for rank in self.workers.set_ranks(worker, 1 if said.ranks is None else said.ranks):
                    await self.probe(rank)
        worker.is_reachable = status is not None
        self.workers.mark(worker, ready=status == HTTPStatus.OK, cause=cause)
        if status == HTTPStatus.OK:
            for action in self.workers.on_found:
                action(worker, probed_s)
        if status is not None:
            self.workers.note_secret(worker, refused=status == HTTPStatus.UNAUTHORIZED)
        # It says itself that it has been stopped, or it says nothing.
        if status == HTTPStatus.GATEWAY_TIMEOUT:
            self._set_hung(worker, True, is_stopped=True)
        elif worker.silent_probes >= SILENT_PROBES:
            self._set_hung(worker, True)

    async def _ask_model(self, worker: Worker) -> None:
        """Asks a worker that becomes ready, and now and then one that is, which model it serves:
        adapters are loaded meanwhile. One that does not say it keeps what it said before."""
        now_s = self.clock()
        if self.stated is None or (worker.ready and now_s - worker.models_asked_s < MODELS_S):
            return
        worker.models_asked_s = now_s
        headers = {PURPOSE_HEADER: PROBE}
        try:
            async with self.session.get(
                worker.url + MODELS_PATH, timeout=_MODELS_TIMEOUT, headers=headers
            ) as got:
                said = await got.read() if got.status == HTTPStatus.OK else b""
            stated = read_stated(orjson.loads(said)) if said else NOT_STATED
        except (TimeoutError, aiohttp.ClientError, ValueError):
            return
        if stated.name:
            self.stated(worker, stated)

    async def _is_waited_for(self, worker: Worker) -> bool:
        """Whether a worker has sent something lately, or shows why it does not. SGLang itself takes
        one for unhealthy that does not generate, so a busy one is not made to."""
        silent_s = worker.silent_s(self.clock())
        signs = await self._signs(worker) if silent_s >= LOOK_S else None
        if signs is not None and signs.is_working:
            worker.worked_s = self.clock()
        quiet_s = min(silent_s, self.clock() - worker.worked_s)
        age_s = None if signs is None else signs.age_s
        is_patient = is_waited_for(silent_s, quiet_s, age_s, self.compile_timeout_s)
        await self._note_stall(worker)
        is_busy = is_patient and silent_s >= HANG_S
        if is_busy and not worker.is_busy:
            why = f"engine silent for {silent_s:.0f} s: it has just started, or compiles"
            log.warning(why, extra={"engine": worker.id})
        worker.is_busy = is_busy
        return is_patient

    async def _note_stall(self, worker: Worker) -> None:
        """Notes whether a worker is stalled. Its requests stay, but for those that came too late
        to be what it does, if another worker can take them."""
        now_s = self.clock()
        quiet_s = min(worker.silent_s(now_s), now_s - worker.worked_s)
        worker.is_stalled = worker.ready and quiet_s >= worker.stalled_after_s
        if worker.is_stalled is not (worker in self._stalled):
            state = "stands still" if worker.is_stalled else "works again"
            log.warning("engine %s", state, extra={"engine": worker.id})
        if not worker.is_stalled:
            self._stalled.discard(worker)
            return
        self._stalled.add(worker)
        if can_answer(each for each in self.workers.all if each.is_available):
            for attempt in tuple(worker.attempts):
                if attempt.sent_s is None or attempt.sent_s > worker.last_heard_s + SENT_LATE_S:
                    attempt.abandon("the engine stands still")
        # Its client may have left before its scheduler saw the request.
        if not worker.in_flight:
            await self._shows_life(worker)

    async def _shows_life(self, worker: Worker) -> bool:
        """Whether a worker generates a token."""
        generates = await self._generates(worker)
        if generates:
            worker.heard(self.clock())
        return generates

    async def _try_breaker(self, worker: Worker) -> None:
        took_requests = worker.breaker.takes_requests
        if await self._generates(worker):
            worker.breaker.succeeded()
        else:
            worker.breaker.trial_failed(self.clock())
        if took_requests is not worker.breaker.takes_requests:
            state = "gets no requests, it keeps failing" if took_requests else "works again"
            log.warning("engine %s", state, extra={"engine": worker.id})

    def _set_hung(self, worker: Worker, is_hung: bool, *, is_stopped: bool = False) -> None:
        """is_stopped: a process of it was stopped from outside."""
        if is_hung is not worker.is_hung:
            state = "hangs" if is_hung else "works again"
            log.warning("engine %s", state, extra={"engine": worker.id})
        worker.is_hung = is_hung
        worker.silent_probes = 0
        if not is_hung or is_stopped:
            worker.hung_s = None
        elif worker.hung_s is None:
            worker.hung_s = self.clock()
        if is_hung:
            self.workers.mark(worker, ready=False, cause="it hangs")
            # Those that a failed abandonment left are abandoned after the next probe.
            for attempt in tuple(worker.attempts):
                attempt.abandon("the engine hangs")

    async def _generates(self, worker: Worker) -> bool:
        path, sent = "/health_generate", {}
        if worker.has_ranks:  # SGLang's own check takes the ranks in turn
            path, sent = "/generate", {"json": _TOKEN, "headers": {RANK_HEADER: str(worker.rank)}}
        try:
            head, _ = await self._head(worker.url + path, _GENERATE_TIMEOUT, sent)
        except TimeoutError:
            return False
        status = None if head is None else head.status
        # One that refuses the secret does not hang, and the next probe finds the reason.
        return status in (HTTPStatus.OK, HTTPStatus.UNAUTHORIZED)

    async def _signs(self, worker: Worker) -> Signs | None:
        """What a worker says about its work; None if it says nothing, or nothing that is valid."""
        try:
            async with self.session.get(f"{worker.url}{WORK_PATH}", timeout=_PROBE_TIMEOUT) as got:
                is_told = got.status == HTTPStatus.OK
                return read_signs(await got.read()) if is_told else None
        except (TimeoutError, aiohttp.ClientError, msgspec.MsgspecError):
            return None

    async def _ready(self, worker: Worker) -> tuple[int | None, Mapping[str, str], str]:
        """The status of the answer, its headers, and the status or the failure in words. As
        `_head`."""
        head, cause = await self._head(f"{worker.url}{READY_PATH}", _PROBE_TIMEOUT)
        if head is None:
            return None, {}, cause
        return head.status, head.headers, f"status {head.status}"

    async def _head(
        self, url: str, limit: aiohttp.ClientTimeout, sent: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[aiohttp.ClientResponse | None, str]:
        """The answer to a GET, or to a POST of what is `sent`; or why the connection is refused or
        breaks. Raises TimeoutError if nothing comes in time."""
        try:
            method = "POST" if sent else "GET"
            async with self.session.request(method, url, timeout=limit, **sent) as response:
                return response, ""
        except TimeoutError:  # some of aiohttp's are a ClientError, too
            raise
        except aiohttp.ClientError as error:
            number = getattr(error, "errno", None)
            return None, os.strerror(number) if number else str(error) or type(error).__name__
