"""A gate before each step of an engine: a test makes a state in place of waiting for one.

    with Gate() as gate:
        ...  # an engine that has `gate.environment` in its environment
        gate.close()
        ...  # send requests with the ids "one" and "two"
        gate.arrived("one", "two")
        gate.answer("one", "two", tokens=120)  # takes steps until both have answered so much
        gate.open()

A closed gate holds the scheduler while it receives requests: what arrives is told, and is taken in
when the gate lets a step pass. The entry rank holds, and the others wait for it. What happens at
the scheduler is told in its order, and nothing that was told is lost: a test looks for an event
among all of them.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

GATE = "SGLEXT_CPU_GATE"
"""The variable that names the gate's Unix socket; without it an engine has no gate."""
SLOWER = "SGLEXT_CPU_SLOWER"
"""The variable by which each forward pass takes so many times as long."""
_WRAPPED = "__sgl_ext_cpu_gate__"
_GENERATE = "TokenizedGenerateReqInput"
_LOOK_S = 0.0005
_HANG_S = 120.0


@dataclass(frozen=True)
class Event:
    """What happened at a scheduler.

    kind: `arrived` (the scheduler has received it), `preempted`, `left` (whole, or aborted), `step`
        (before its forward pass), or `idle`.
    rid: of the request; "" for a step. What arrives and is no request for an answer has its type's
        name, such as `AbortReq`.
    requests: of a step, each request of the batch: the tokens of its prompt that are computed once
        the step is over, and the tokens of its answer before it. SGLang takes in the result of a
        step while the next one runs, so the answer is one token behind.
    waiting: of a step, the requests in the queue, in their order.
    """

    kind: str
    rid: str = ""
    is_prefill: bool = False
    requests: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    waiting: tuple[str, ...] = ()

    def computed(self, rid: str) -> int:
        """The tokens of its prompt; 0 if it is not in the step."""
        return self.requests.get(rid, (0, 0))[0]

    def answered(self, rid: str) -> int:
        """The tokens of its answer; 0 if it is not in the step."""
        return self.requests.get(rid, (0, 0))[1]


class Gate:
    """The test's side: opens and closes, and has all events in their order. It is open at first."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gate-")
        path = str(Path(self._folder.name) / "gate")
        self.environment = {GATE: path}
        """The variables of an engine with this gate."""
        self.events: list[Event] = []
        self._order = "open"
        self._changed = threading.Condition()
        self._engines: list[socket.socket] = []
        self._readers: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Holds the scheduler before its next step; what it has begun goes on to its end."""
        self._say("close")

    def open(self) -> None:
        """Lets the scheduler go."""
        self._say("open")

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Closed in the block, and open after it."""
        self.close()
        try:
            yield
        finally:
            self.open()

    def step(self, number: int = 1) -> list[Event]:
        """Lets a held scheduler take so many steps, and returns them once the last has begun."""
        at = self.mark()
        self._say(f"step {number}")
        return self._wait(partial(self._told, "step", at), number)[:number]

    def run_until(self, happened: Callable[[Event], bool]) -> Event:
        """Takes a step after the other until an event is so, and returns that event."""
        at, allowed = self.mark(), 0

        def found() -> list[Event]:
            """The event, or all steps that were allowed: then one more is."""
            events = [event for event in self.events[at:] if happened(event)]
            return events or self._told("step", at)[allowed - 1 :]

        while True:
            allowed += 1
            self._say("step 1")
            event = self._wait(found, 1)[0]
            if happened(event):
                self._say("close")  # a step that was allowed may have had nothing to do
                return event

    def answer(self, *rids: str, tokens: int = 1) -> None:
        """Takes steps until each of these has so many tokens of its answer."""
        self.run_until(lambda event: all(event.answered(rid) >= tokens for rid in rids))

    def begin(self, rid: str) -> None:
        """Takes steps until the prompt of this one is being computed."""
        self.run_until(lambda event: event.computed(rid) > 0)

    def finish(self, rid: str) -> None:
        """Takes steps until this one is answered whole, or aborted."""
        self.run_until(lambda event: (event.kind, event.rid) == ("left", rid))

    def until(self, happened: Callable[[Event], bool], since: int = 0) -> Event:
        """The first event since a mark that is so; waits for it."""
        return self._wait(lambda: [e for e in self.events[since:] if happened(e)], 1)[0]

    def arrived(self, *rids: str, since: int = 0) -> None:
        """Returns once the scheduler has received these, since a mark."""
        for rid in rids:
            self._wait(partial(self._told, "arrived", since, rid), 1)

    def count(self, number: int, kind: str, since: int = 0) -> None:
        """Returns once so many events of this kind were told since a mark."""
        self._wait(partial(self._told, kind, since), number)

    def _told(self, kind: str, since: int, rid: str | None = None) -> list[Event]:
        found = [event for event in self.events[since:] if event.kind == kind]
        return found if rid is None else [event for event in found if event.rid == rid]

    def mark(self) -> int:
        """The place of the next event."""
        with self._changed:
            return len(self.events)

    def _wait(self, found: Callable[[], list[Event]], least: int) -> list[Event]:
        with self._changed:
            if not self._changed.wait_for(lambda: len(found()) >= least, _HANG_S):
                last = [event for event in self.events if event.kind != "step"][-8:]
                raise AssertionError(f"it never came to happen; the last events are {last}")
            return found()

    def _say(self, order: str) -> None:
        with self._changed:
            if not order.startswith("step"):
                self._order = order
            for engine in self._engines:
                with suppress(OSError):  # it was killed
                    engine.sendall(f"{order}\n".encode())

    def _accept(self) -> None:
        while True:
            try:
                engine, _ = self._listener.accept()
            except OSError:
                return
            with self._changed, suppress(OSError):
                engine.sendall(f"{self._order}\n".encode())
                self._engines.append(engine)
            reader = threading.Thread(target=self._read, args=(engine,), daemon=True)
            self._readers.append(reader)
            reader.start()

    def _read(self, engine: socket.socket) -> None:
        with engine, engine.makefile("r") as lines, suppress(OSError):
            for line in lines:
                told = json.loads(line)
                told["requests"] = {rid: (a, b) for rid, (a, b) in told["requests"].items()}
                told["waiting"] = tuple(told["waiting"])
                with self._changed:
                    self.events.append(Event(**told))
                    self._changed.notify_all()
        with self._changed:
            self._engines.remove(engine)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        """Engines that still run are held no longer."""
        with self._changed:
            self._listener.close()
            for engine in self._engines:
                with suppress(OSError):
                    engine.shutdown(socket.SHUT_RDWR)
        for reader in self._readers:
            reader.join()
        self._folder.cleanup()


class _Held:
    """The scheduler's side."""

    def __init__(self, path: str) -> None:
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._orders, self._is_open, self._allowed = b"", True, 0
        self._is_idle = False
        self._take(wait=True)

    def receive(self, original: Callable[..., Any], receiver: Any) -> list[Any]:
        """Around `SchedulerRequestReceiver._pull_raw_reqs`: goes on while the gate is closed."""
        received = self._received(original(receiver))
        self._take()
        while not (self._is_open or self._allowed):
            time.sleep(_LOOK_S)
            received += self._received(original(receiver))
            self._take()
        return received

    def _received(self, requests: list[Any]) -> list[Any]:
        for request in requests:
            for one in getattr(request, "batch", None) or [request]:
                name = type(one).__name__
                self.tell("arrived", one.rid if name == _GENERATE else name)
        return requests

    def plan(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kw: Any) -> Any:
        """Around `Scheduler.get_next_batch_to_run`."""
        plan = original(scheduler, *args, **kw)
        batch = plan.batch_to_run
        if batch is not None:
            self._allowed, self._is_idle = max(0, self._allowed - 1), False
            self._tell_step(scheduler, batch)
        elif not self._is_idle and not scheduler.waiting_queue and scheduler.last_batch is None:
            self._is_idle = True
            self.tell("idle")
        return plan

    def end(
        self, original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kw: Any
    ) -> Any:
        """Around `Scheduler.process_batch_result`."""
        running = [req for req in batch.reqs if not req.finished()]
        found = original(scheduler, batch, *args, **kw)
        for req in running:
            if req.finished():
                self.tell("left", req.rid)
        return found

    def abort(self, original: Callable[..., Any], scheduler: Any, order: Any) -> Any:
        """Around `Scheduler.abort_request`: those that waited have left; one that runs leaves with
        its batch."""
        before = [req.rid for req in scheduler.waiting_queue]
        found = original(scheduler, order)
        after = {req.rid for req in scheduler.waiting_queue}
        for rid in before:
            if rid not in after:
                self.tell("left", rid)
        return found

    def preempt(self, original: Callable[..., Any], req: Any) -> Any:
        """Around `Req.reset_for_retract`."""
        self.tell("preempted", req.rid)
        return original(req)

    def _tell_step(self, scheduler: Any, batch: Any) -> None:
        is_prefill = batch.forward_mode.is_extend()
        requests = {
            req.rid: (
                req.prefix_len + req.extend_len if is_prefill else len(req.origin_input_ids),
                len(req.output_ids),
            )
            for req in batch.reqs
        }
        waiting = [req.rid for req in scheduler.waiting_queue]
        self.tell("step", is_prefill=is_prefill, requests=requests, waiting=waiting)

    def tell(
        self,
        kind: str,
        rid: str = "",
        *,
        is_prefill: bool = False,
        requests: Mapping[str, Any] | None = None,
        waiting: list[str] | None = None,
    ) -> None:
        """Tells of an event, unless the test has ended."""
        if self._socket is None:
            return
        event = {
            "kind": kind,
            "rid": rid,
            "is_prefill": is_prefill,
            "requests": requests or {},
            "waiting": waiting or [],
        }
        try:
            self._socket.sendall(json.dumps(event).encode() + b"\n")
        except OSError:
            self._let_go()

    def _take(self, *, wait: bool = False) -> None:
        """Reads the orders that have come."""
        if self._socket is None:
            return
        try:
            got = self._socket.recv(4096, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            got = b""
        if not got:
            self._let_go()
            return
        *orders, self._orders = (self._orders + got).split(b"\n")
        for order in orders:
            name, _, number = order.partition(b" ")
            if name == b"step":
                self._allowed += int(number)
            else:
                self._is_open, self._allowed = name == b"open", 0

    def _let_go(self) -> None:
        self._socket, self._is_open = None, True


@functools.cache
def _held() -> _Held | None:
    """Of this scheduler; None on a rank that waits for the entry rank."""
    from sglang.srt.runtime_context import get_parallel

    ranks = get_parallel()
    if ranks.tp_rank or ranks.pp_rank:
        return None
    return _Held(os.environ[GATE])


def install() -> None:
    """Makes the changes that the variables ask for, in a worker. Can be called again."""
    if factor := os.environ.get(SLOWER):
        from sglang.srt.model_executor.model_runner import ModelRunner

        _wrap(ModelRunner, "forward", partial(_slower, float(factor)))
    if os.environ.get(GATE):
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.managers.scheduler_components.request_receiver import (
            SchedulerRequestReceiver,
        )

        _gate(Scheduler, "get_next_batch_to_run", _Held.plan)
        _gate(SchedulerRequestReceiver, "_pull_raw_reqs", _Held.receive)
        _gate(Scheduler, "process_batch_result", _Held.end)
        _gate(Scheduler, "abort_request", _Held.abort)
        _gate(Req, "reset_for_retract", _Held.preempt)


def _gate(owner: Any, name: str, around: Callable[..., Any]) -> None:
    def gated(original: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        held = _held()
        return original(*args, **kw) if held is None else around(held, original, *args, **kw)

    _wrap(owner, name, gated)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    if hasattr(original, _WRAPPED):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kw: Any) -> Any:
        return around(original, *args, **kw)

    setattr(wrapped, _WRAPPED, True)
    setattr(owner, name, wrapped)


def _slower(factor: float, original: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    began = time.perf_counter()
    found = original(*args, **kw)
    time.sleep((factor - 1) * (time.perf_counter() - began))
    return found
