"""`sgl-ext top`: a node's state in a terminal, live.

thread: GET /sgl_ext/live, again after each failure --> Feed --> the loop: keys, size, screen

The screen has a headline; sparklines of hit rate, TTFT, requests, tokens, and the queue; and tables
of engines, models if there are several, the latest events, sessions, pins and tenants, which share
the lines that are left.
"""

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sgl_ext.cli.events import STYLES
from sgl_ext.cli.node import HERE, Key, Node, NodeError, Url, UsageError, node_at
from sgl_ext.cli.show import cell, console, duration, percent, plain, state, table
from sgl_ext.cli.status import (
    LIVE,
    STATE,
    Engine,
    Event,
    Pin,
    ServedModel,
    Session,
    State,
    Tenant,
    engine_row,
    exits,
    failures,
    queue_line,
    read_state,
    status_line,
)

_TICK_S = 0.2
_RETRY_S = 1.0
_QUIT = b"qQ\x03\x04"


class Feed:
    """The latest state of a node, kept by a thread.

    note: what is wrong with the connection; None while it is live.
    """

    def __init__(self, node: Node, first: State) -> None:
        self.state = first
        self.note: str | None = None
        self._node = node

    def follow(self) -> None:
        """Reads the node's stream, again and again."""
        while True:
            try:
                for document in self._node.events(LIVE):
                    self.state, self.note = read_state(document, self._node), None
                self.note = f"{self._node.url} ended the stream; connecting again"
            except NodeError as error:
                self.note = str(error)
            time.sleep(_RETRY_S)


def top(url: Url = HERE, key: Key = None) -> None:
    """Show a node live: engines, models, events, queue, cache, sessions, pins, tenants. q quits."""
    from rich.live import Live

    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
        raise UsageError("top: needs a terminal; for programs there is sgl-ext status --json")
    node = node_at(url, key)
    feed = Feed(node, read_state(node.get(STATE), node))
    shown = console()
    Thread(target=feed.follow, daemon=True).start()
    last: object = None
    with _keys() as pressed, Live(console=shown, screen=True, auto_refresh=False) as live:
        while not pressed(_TICK_S):
            size = os.get_terminal_size()
            now = (feed.state, feed.note, size)
            if now != last:
                shown.size = size
                live.update(dashboard(feed.state, node.url, feed.note, *size), refresh=True)
                last = now


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Gives a function that waits for a key and says whether it quits.

    The terminal does not echo meanwhile, and is left as it was, whatever ends this.
    """
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    def pressed(timeout_s: float) -> bool:
        readable, _, _ = select.select([terminal], [], [], timeout_s)
        read = os.read(terminal, 64) if readable else None
        return read is not None and (not read or any(key in _QUIT for key in read))

    # A stopped program would leave the terminal to the shell as it is here.
    earlier = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    earlier[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        tty.setcbreak(terminal)
        with suppress(KeyboardInterrupt):
            yield pressed
    finally:
        with suppress(termios.error):  # it may be gone
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)
        for number, handler in earlier.items():
            signal.signal(number, handler)


_BLOCKS = "▁▂▃▄▅▆▇█"
_HEAD_LINES = 4
# Between two tables there is an empty line, and each has a line of heads.
_TABLE_LINES = 2
_LEAST_SPARK = 8
_MOST_EXITS = 3
_MOST_EVENTS = 5
_GAP = 2  # columns between two columns of a table
_ENGINE_HEADS = ("state", "#run", "#wait", "#KV used", "#pinned", "#free", "#hits")


class Section(NamedTuple):
    """A table. total: how many rows there are, if `rows` are not all."""

    heads: tuple[str, ...]
    rows: list[tuple[object, ...]]
    total: int


def dashboard(found: State, url: str, note: str | None, width: int, height: int) -> RenderableType:
    """A node's state in a terminal of this size. note: what is wrong with the connection."""
    sections = [section for section in _sections(found) if section.rows]
    ended = [*failures(found), *exits(found)][:_MOST_EXITS]
    room = height - _HEAD_LINES - len(ended)
    while sections and len(sections) * (_TABLE_LINES + 1) > room:
        sections.pop()
    lines = room - len(sections) * _TABLE_LINES
    wants = [len(section.rows) for section in sections]
    parts: list[RenderableType] = [_headline(found, url, note), _figures(found, width)]
    for line in ended:
        parts.append(Text(line, style="red", no_wrap=True, overflow="ellipsis"))
    for section, count in zip(sections, shared_out(lines, wants), strict=True):
        parts += [Text(), _table(section, count, width)]
    return Group(*parts)


def shared_out(lines: int, wants: Sequence[int]) -> list[int]:
    """How many lines each of several tables gets: what it wants, or an equal part of the rest."""
    given = [0] * len(wants)
    order = sorted(range(len(wants)), key=lambda n: wants[n])
    for done, n in enumerate(order):
        given[n] = min(wants[n], max(lines, 0) // (len(order) - done))
        lines -= given[n]
    return given


def sparkline(values: Sequence[float | None], width: int, top: float | None = None) -> str:
    """Values as blocks, the newest to the right; a blank where nothing is known.

    top: the value of a full block, if it is not the largest. More values than `width` are averaged
    in groups.
    """
    size = -(-len(values) // width) or 1
    first = len(values) % size  # the oldest group may be smaller
    ends = range(first or size, len(values) + 1, size)
    groups = [values[max(end - size, 0) : end] for end in ends]
    means = [_mean([value for value in group if value is not None]) for group in groups]
    known = [mean for mean in means if mean is not None]
    top = top or max(known, default=0.0) or 1.0
    last = len(_BLOCKS) - 1
    blocks = (
        " " if mean is None else _BLOCKS[min(max(round(mean / top * last), 0), last)]
        for mean in means
    )
    return "".join(blocks).rjust(width)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _headline(found: State, url: str, note: str | None) -> Table:
    """Where and how the node is; to the right what is wrong, or the key that quits."""
    node = found.node
    said = Text("sgl-ext", style="bold").append(f"  {plain(url)}  ", style="default")
    said.append(status_line(found), style=state(node.status).style)
    said.append(f"  {plain(node.model)}" if node.model else "")
    if node.started_s is not None and node.now_s is not None:
        said.append(f"  up {duration(node.now_s - node.started_s)}")
    line = Table.grid(expand=True, padding=(0, 1))
    line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    line.add_column(no_wrap=True, overflow="ellipsis", justify="right")
    if note is None:
        line.add_row(said, Text("q: quit", style="dim"))
    else:
        line.add_row(Text(plain(note), style="bold red"), Text("q: quit", style="dim"))
    return line


def _figures(found: State, width: int) -> Table:
    """Two columns of figures of the last minute, each with its course over the last hour."""
    past, now, half = found.history, found.recent, width // 2
    grid = Table.grid(expand=True, padding=(0, 1))
    for _ in range(2):
        grid.add_column(width=10, no_wrap=True)
        grid.add_column(width=8, no_wrap=True, justify="right")
        grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    spark = max(half - 10 - 8 - 3, _LEAST_SPARK)

    def row(
        name: str, value: str | None, values: list[float | None], top: float | None = None
    ) -> tuple[Text, Text, Text]:
        return Text(name), cell(value), Text(sparkline(values, spark, top), style="cyan")

    def of(value: float | None, unit: str) -> str | None:
        return None if value is None else f"{value:,.3g}{unit}"

    grid.add_row(
        *row("hit rate", percent(now.hit_rate), past.hit_rate, 1.0),
        *row("requests", of(now.requests_per_s, "/s"), past.requests_per_s),
    )
    grid.add_row(
        *row("TTFT p50", of(now.ttft_p50_s, " s"), past.ttft_p50_s),
        *row("output", of(now.output_tokens_per_s, " t/s"), past.output_tokens_per_s),
    )
    queue = Text(plain(queue_line(found)), style="yellow" if found.queue.waiting else "default")
    flight = cell(found.node.in_flight)
    tail = row("TTFT p99", of(now.ttft_p99_s, " s"), past.ttft_p99_s)
    grid.add_row(*tail, Text("in flight"), flight, queue)
    return grid


def _sections(found: State) -> list[Section]:
    """Engines by their short names, and large numbers in short, as the columns are narrow."""
    ids = [engine.id for engine in found.engines]
    # What all of them end with, as engine-0@HOST:PORT and engine-1@HOST:PORT do.
    node = {id.partition("@")[2] for id in ids}
    counts = found.counts

    def name(id: str | None) -> str | None:
        return id.partition("@")[0] if id and len(node) == 1 else id

    def engine(each: Engine) -> tuple[object, ...]:
        id, state, *figures, hit_rate = engine_row(each)
        return (name(str(id)), state, *map(_short, figures), hit_rate)

    def session(each: Session) -> tuple[object, ...]:
        now_s, last_s = found.node.now_s, each.last_s
        idle = None if now_s is None or last_s is None else duration(now_s - last_s)
        read = _short(each.prompt_tokens), percent(each.cached_share), idle
        kind = each.agent or each.request_class or each.harness
        return (each.id, each.tenant, kind, name(each.engine), each.turns, *read)

    def pin(each: Pin) -> tuple[object, ...]:
        left = None if each.left_s is None else duration(each.left_s)
        whose = each.prefix[:12], each.owner, each.session, name(each.worker)
        return (*whose, _short(each.tokens), each.hits, left)

    def tenant(each: Tenant) -> tuple[object, ...]:
        read = _short(each.prompt_tokens), percent(each.cached_share)
        return (each.name or "(none)", each.requests, *read)

    def model(each: ServedModel) -> tuple[object, ...]:
        ready, hits = f"{each.ready} of {each.engines}", percent(each.hit_rate)
        return (each.name, each.fallback, ready, each.in_flight, each.waiting, hits)

    def event(each: Event) -> tuple[object, ...]:
        now_s = found.node.now_s
        times = f" ({each.times:,} times)" if each.times > 1 else ""
        ago = None if now_s is None else duration(max(now_s - each.time_s, 0))
        kind = Text(plain(each.kind), style=STYLES.get(each.level, ""))
        return (kind, name(each.subject), each.text + times, ago)

    heads = ("tenant", "agent", "engine", "#turns", "#prompt", "#cached", "#idle")
    whose = ("tenant", "session", "engine")
    return [
        Section(("engines", *_ENGINE_HEADS), [*map(engine, found.engines)], 0),
        Section(
            ("models", "fallback", "#ready", "#in flight", "#wait", "#hits"),
            [*map(model, found.models)] if len(found.models) > 1 else [],
            0,
        ),
        Section(
            ("events", "of", "what", "#ago"),
            [*map(event, found.events[: -_MOST_EVENTS - 1 : -1])],
            len(found.events),
        ),
        Section(("sessions", *heads), [*map(session, found.sessions)], counts.sessions or 0),
        Section(
            ("pins", *whose, "#tokens", "#hits", "#left"), [*map(pin, found.pins)], counts.pins or 0
        ),
        Section(
            ("tenants", "#requests", "#prompt", "#cached"),
            [*map(tenant, found.tenants)],
            counts.tenants or 0,
        ),
    ]


def _short(number: object) -> object:
    """Tokens in at most five characters."""
    if not isinstance(number, int) or number < 10_000:
        return number
    size, unit = (1e6, "M") if number >= 1e6 else (1e3, "K")
    return f"{number / size:.{0 if number >= 100 * size else 1}f}{unit}"


def _table(section: Section, count: int, width: int) -> Table:
    """The first rows of a section; its first head says how many there are in all.

    Numbers are whole, and names share the columns that are left.
    """
    first, *heads = section.heads
    total = max(section.total, len(section.rows))
    shown = f"{first} ({count} of {total:,})" if count < total else first
    rows = [[*map(cell, row)] for row in section.rows[:count]]
    made = table((shown, *heads), rows)
    lengths = [
        max(len(column.header), *(row[n].cell_len for row in rows))
        for n, column in enumerate(made.columns)
        if isinstance(column.header, str)
    ]
    names = [n for n, column in enumerate(made.columns) if column.justify == "left"]
    room = width - sum(lengths) + sum(lengths[n] for n in names) - _GAP * (len(lengths) - 1)
    for n, size in zip(names, shared_out(room, [lengths[n] for n in names]), strict=True):
        made.columns[n].width = max(size, 1)
    for column in made.columns:
        column.no_wrap, column.overflow = True, "ellipsis"
    return made
